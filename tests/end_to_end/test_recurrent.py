"""Recurrent layers under the compile engine: one op a layer, its stash a choice of the plan, the same bits in each."""

import pytest
import torch
from torch import Tensor, nn

import torchecho
from tests.end_to_end.models import Case, Loss
from tests.end_to_end.steps import Left, differences, prepare, run_step
from tests.rnn.layers import asked_for
from torchecho.capture.stash_modes import alternatives
from torchecho.engine import generated, piece
from torchecho.planner.plan import Plan


class Reader(nn.Module):
    """Linear layers around a recurrent module."""

    def __init__(self, layers: nn.Module, size: int) -> None:
        super().__init__()
        self.before, self.layers, self.after = nn.Linear(size, size), layers, nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Map (T, B, size) to the same."""
        return self.after(torch.relu(self.layers(torch.tanh(self.before(x)))[0]))


class Autocast(nn.Module):
    """A module under bfloat16 autocast."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Run in bfloat16."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


def _input() -> tuple[Tensor, ...]:
    return (torch.randn(40, 8, 24),)


CASES = {
    "lstm": Case(lambda: Loss(Reader(nn.LSTM(24, 24, num_layers=2, dropout=0.2), 24)), _input),
    "lstm both ways": Case(lambda: Loss(Reader(nn.LSTM(24, 12, bidirectional=True, batch_first=True), 24)), _input),
    "gru": Case(lambda: Loss(Reader(nn.GRU(24, 24, num_layers=2), 24)), _input),
    "bfloat16": Case(
        lambda: Loss(Reader(nn.LSTM(24, 24, num_layers=2), 24)).bfloat16(), lambda: (torch.randn(40, 8, 24).bfloat16(),)
    ),
    "autocast": Case(lambda: Loss(Autocast(Reader(nn.LSTM(24, 24, num_layers=2), 24))), _input),
    "torchecho's own": Case(lambda: Loss(Reader(torchecho.nn.LSTM(24, 24), 24)), _input),
}


def step(case: Case, lowering: str, **options: object) -> tuple[Left, Plan]:
    """Do a case's step in a fresh compile and return what it left, and its plan."""
    torch._dynamo.reset()
    model, inputs = prepare(case, engine="compile", lowering=lowering, strict=True, **options)
    return run_step(model, inputs, model), torchecho.plans()[-1]


def in_lean(plan: Plan) -> int:
    """Return how many layers a plan lets rebuild their gates."""
    notes = [note for note in plan.notes if "rebuild their gates" in note]
    return int(notes[0].split()[0]) if notes else 0


@pytest.fixture
def gates_only(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let every layer stash its gates, until it is undone: which mode is faster for such small layers is noise."""
    for module in (piece, generated):
        monkeypatch.setattr(module, "alternatives", lambda num_layers: alternatives(num_layers)[:1])
    return monkeypatch


@pytest.mark.parametrize(("name", "lowering"), [*((name, "eager") for name in CASES), ("lstm", "inductor")])
def test_every_mode_gives_the_same_bits_at_the_predicted_peak(
    name: str, lowering: str, gates_only: pytest.MonkeyPatch
) -> None:
    reference, untouched = step(CASES[name], lowering, max_slowdown=0.0)
    assert (untouched.lowering, in_lean(untouched)) == (lowering, 0)
    assert untouched.num_ops < 60  # 40 steps, unrolled, are several hundred
    gates_only.undo()
    left, plan = step(CASES[name], lowering, max_slowdown=100.0)
    assert differences(reference, left) == []
    assert in_lean(plan) == (1 if name in ("lstm both ways", "torchecho's own") else 2)
    assert plan.predicted_peak_bytes == plan.floor_bytes < untouched.floor_bytes
    for made in (untouched, plan):
        assert made.measured_peak_bytes is not None
        assert abs(made.measured_peak_bytes / made.predicted_peak_bytes - 1) <= 0.005


def test_what_the_kernels_cannot_serve_is_unrolled() -> None:
    case = Case(lambda: Loss(nn.LSTM(6, 5)).double(), lambda: (torch.randn(7, 3, 6).double(),))
    _, plan = step(case, "eager", max_slowdown=0.0)
    assert not any("torchecho" in row.target for row in plan.stashed)


def test_without_kernels_layers_are_unrolled() -> None:
    with asked_for("naive"):
        _, plan = step(Case(lambda: Loss(nn.GRU(6, 5)), lambda: (torch.randn(7, 3, 6),)), "eager", max_slowdown=0.0)
    assert not any("torchecho" in row.target for row in plan.stashed)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_sizes_that_change(kind: str) -> None:
    """With ``dynamic`` Dynamo hands the probability of dropout over as a symbol, too."""
    torch._dynamo.reset()
    layer = getattr(nn, kind)(4, 8, num_layers=2, dropout=0.5)
    compiled = torch.compile(layer, backend="torchecho", dynamic=True)
    assert compiled(torch.randn(6, 3, 4))[0].shape == (6, 3, 8)
    layer.eval()
    x = torch.randn(5, 2, 4)
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])


@pytest.mark.parametrize("layer", [nn.Linear(4, 8), nn.LSTM(4, 8)], ids=["linear", "lstm"])
def test_batches_without_rows(layer: nn.Module) -> None:
    torch._dynamo.reset()
    x = torch.randn(6, 0, 4, requires_grad=True)
    made = torch.compile(layer, backend="torchecho")(x)
    (made if isinstance(made, Tensor) else made[0]).sum().backward()
    assert all(not parameter.grad.any() for parameter in layer.parameters())
    assert x.grad.shape == x.shape
