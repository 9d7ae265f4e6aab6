import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchecho.bench.training import Snapshot, Training, make_forward, paired_seconds


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 2))

    def forward(self, features, labels):
        return F.cross_entropy(self.layers(features), labels)


@pytest.fixture
def training():
    model = Net()
    batch = (torch.randn(16, 8), torch.randint(0, 2, (16,)))
    return Training(model, torch.optim.Adam(model.parameters()), batch)


def test_num_parameters(training):
    assert training.num_parameters == 8 * 32 + 32 + 2 * 32 + 32 * 2 + 2


def test_a_step_trains_and_leaves_no_gradient(training):
    before = [p.detach().clone() for p in training.model.parameters()]
    training.step(training.model)
    assert not any(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))
    assert all(p.grad is None for p in training.model.parameters())


def test_a_snapshot_repeats_a_step_bit_for_bit(training):
    training.step(training.model)
    snapshot = Snapshot(training, seed=3)
    first = snapshot.step(training.model)
    training.step(training.model)
    assert snapshot.step(training.model) == first


def test_a_snapshot_tells_what_differs(training):
    snapshot = Snapshot(training, seed=3)
    _, parts = snapshot.step(training.model)

    def scaled(*batch):
        return training.model(*batch) * 2

    def extra_draw(*batch):
        loss = training.model(*batch)
        torch.rand(1)
        return loss

    def differing(forward):
        other = snapshot.step(forward)[1]
        return {name for name in parts if parts[name] != other[name]}

    assert {"loss", "gradients"} <= differing(scaled)
    assert differing(extra_draw) == {"random state"}


@pytest.mark.parametrize(
    ("system", "setting", "options"),
    [
        ("eager", None, {}),
        ("stash_all", None, {}),
        ("compile", None, {}),
        ("torchecho", None, {"max_slowdown": 0, "lowering": "eager", "cost": "roofline"}),
        ("torchecho", None, {"max_slowdown": 10, "lowering": "eager", "cost": "roofline"}),
    ],
)
def test_every_system_trains_with_the_same_bits(training, system, setting, options):
    snapshot = Snapshot(training, seed=3)
    expected = snapshot.step(training.model)
    assert snapshot.step(make_forward(training, system, setting, options)) == expected


def test_memory_budget_keeps_the_forward(training):
    snapshot = Snapshot(training, seed=3)
    assert snapshot.step(make_forward(training, "memory_budget", 0.2, {}))[0] == snapshot.step(training.model)[0]


def test_making_a_forward_leaves_the_model_as_it_was(training):
    make_forward(training, "torchecho", None, {"max_slowdown": 0})
    assert training.model._compiled_call_impl is None


def test_pairs_take_turns():
    ran = []
    seconds = paired_seconds(lambda: ran.append("a"), lambda: ran.append("b"), 3)
    assert "".join(ran) == "ab" + "ab" + "ba" + "ab"
    assert [len(side) for side in seconds] == [3, 3]
