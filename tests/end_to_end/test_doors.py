"""The ways in (torch.compile by name, optimize, disable, plan), and the programs that they must not break."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor  # torch's own subclass for tests: two tensors in one

import torchecho
from tests.end_to_end.steps import differences, run_step
from torchecho.engine import piece

PLANNED = {"max_slowdown": 0.5, "lowering": "eager", "strict": True}
REFERENCE = {"max_slowdown": 0.0, "lowering": "eager", "strict": True}


class Net(nn.Module):
    """Layers with room to recompute; `breaks` splits the graph in the middle."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.norm = nn.BatchNorm1d(64)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 16) to a loss."""
        x = F.gelu(torch.tanh(self.norm(self.first(x))))
        if self.breaks:
            torch._dynamo.graph_break()
        x = F.dropout(F.gelu(self.second(torch.sigmoid(x))), 0.2, self.training)
        return F.gelu(self.third(x)).pow(2).mean()


def both(*, breaks: bool = False) -> tuple[Net, Net]:
    """Return the same model twice: planned, and in the reference lowering."""
    planned = Net(breaks=breaks)
    reference = copy.deepcopy(planned)
    return torchecho.optimize(planned, **PLANNED), torchecho.optimize(reference, **REFERENCE)


def batch(rows: int = 64) -> Tensor:
    """Return a batch of inputs."""
    return torch.randn(rows, 16)


def test_torch_compile_finds_the_backend_by_name() -> None:
    model = Net()
    twin, x = copy.deepcopy(model), batch()
    planned = run_step(torch.compile(model, backend="torchecho", options=PLANNED), (x,), model)
    plan = torchecho.plans()[-1]
    assert plan.num_recomputed > 0
    assert plan.lowering == "eager"
    torch._dynamo.reset()
    assert differences(planned, run_step(torch.compile(twin, backend="torchecho", options=REFERENCE), (x,), twin)) == []


# Dynamo itself looks at the gradient of the value that it hands from one piece to the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_graph_breaks_make_a_plan_for_each_piece() -> None:
    planned, reference = both(breaks=True)
    x, before = batch(), len(torchecho.plans())
    left = run_step(planned, (x,), planned)
    assert len(torchecho.plans()) == before + 2
    assert differences(left, run_step(reference, (x,), reference)) == []


def test_batch_sizes_may_change() -> None:
    planned, reference = both()
    for rows in (64, 48, 32, 64, 7):
        x = batch(rows)
        assert differences(run_step(planned, (x,), planned), run_step(reference, (x,), reference)) == []
        planned.zero_grad()
        reference.zero_grad()


def test_evaluation_without_gradients_is_untouched() -> None:
    planned, _ = both()
    plain = torchecho.disable(copy.deepcopy(planned))
    planned.eval()
    plain.eval()
    x, before = batch(), len(torchecho.plans())
    with torch.no_grad():
        assert torch.equal(planned(x), plain(x))
    with torch.inference_mode():
        assert torch.equal(planned(x), plain(x))
    assert len(torchecho.plans()) == before


@pytest.mark.filterwarnings("ignore:torchecho.*over the budget:torchecho.EchoWarning")
def test_two_calls_in_one_step_and_a_retained_graph() -> None:
    x, y, left = batch(), batch(), []
    for model in both():
        torch.manual_seed(1)
        loss = model(x) + model(y)
        loss.backward(retain_graph=True)
        loss.backward()
        left.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


def test_two_losses_in_reverse_order() -> None:
    x, left = batch(), []
    for model in both():
        torch.manual_seed(1)
        first, second = model(x), model(x * 2)
        second.backward()
        first.backward()
        left.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


def test_frozen_parameters_and_input_gradients() -> None:
    left = []
    x = batch()
    for model in both():
        model.first.weight.requires_grad_(requires_grad=False)
        mine = x.clone().requires_grad_()
        left.append(run_step(model, (mine,), model) | {"input": mine.grad})
    assert left[0]["grad first.weight"] is None
    assert left[0]["input"] is not None
    assert differences(*left) == []


def test_accumulation_clipping_and_momentum_train_alike() -> None:
    weights = []
    for model in both():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            for micro in range(2):
                torch.manual_seed(10 * step + micro)
                (model(batch()) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_parameter_changed_before_backward_is_an_error_as_in_eager() -> None:
    planned, _ = both()
    loss = planned(batch())
    with torch.no_grad():
        planned.second.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_fire_once_each_step() -> None:
    planned, _ = both()
    calls: list[str] = []
    planned.register_forward_hook(lambda *_: calls.append("forward"))
    planned.first.weight.register_hook(lambda _: calls.append("gradient"))
    planned.second.weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    for _ in range(2):
        calls.clear()
        run_step(planned, (batch(),), planned)
        assert sorted(calls) == ["accumulated", "forward", "gradient"]


def test_optimize_changes_nothing_that_others_see() -> None:
    planned, _ = both()
    run_step(planned, (batch(),), planned)
    assert type(planned) is Net
    assert list(planned.state_dict()) == list(Net().state_dict())
    for twin in (pickle.loads(pickle.dumps(planned)), copy.deepcopy(planned)):
        assert type(twin) is Net
        assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), planned.parameters(), strict=True))
    torch.save(planned, io.BytesIO())


def test_disable_takes_a_model_back() -> None:
    planned, _ = both()
    before = len(torchecho.plans())
    run_step(torchecho.disable(planned), (batch(),), planned)
    assert len(torchecho.plans()) == before


def test_unused_parameters_keep_no_gradient_and_outputs_may_be_dictionaries() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(16, 16), nn.Parameter(torch.ones(2))

        def forward(self, *, x: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
            return {"loss": (torch.tanh(self.used(x)) * scale).sum(), "made": self.used(x)}

    model = torchecho.optimize(Named(), **PLANNED)
    model(x=batch(4))["loss"].backward()
    assert model.unused.grad is None
    assert model.used.weight.grad is not None


def test_loss_outside_the_model() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 128), nn.Linear(128, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.gelu(torch.tanh(self.a(x))))

    planned = Logits()
    reference = copy.deepcopy(planned)
    x, y, left = batch(), torch.randint(0, 64, (64,)), []
    for model, options in ((planned, PLANNED), (reference, REFERENCE)):
        optimized = torchecho.optimize(model, **options)
        left.append(run_step(lambda x, m=optimized: F.cross_entropy(m(x), y), (x,), model))
    assert differences(*left) == []


def test_an_exception_in_the_users_forward_leaves_the_next_step_right() -> None:
    planned, reference = both()
    with pytest.raises(Exception, match=r"reduction dim|shapes cannot be multiplied"):
        planned(torch.randn(64, 17))
    x = batch()
    assert differences(run_step(planned, (x,), planned), run_step(reference, (x,), reference)) == []


def test_a_failure_inside_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("boom")

    monkeypatch.setattr(piece, "apply_schedule", fail)
    model = torchecho.optimize(Net(), max_slowdown=0.5, lowering="eager")
    with pytest.warns(torchecho.EchoWarning, match="runs untouched: planning it failed with KeyError"):
        model(batch()).backward()
    torch._dynamo.reset()
    strict = torchecho.optimize(Net(), **PLANNED)
    with pytest.raises(torchecho.EchoError, match="boom"):
        strict(batch())


def test_an_unreachable_budget_names_the_floor() -> None:
    model = torchecho.optimize(Net(), memory_budget="1KiB", lowering="eager")
    with pytest.raises(torchecho.BudgetError, match=r"budget 1\.0 KiB is below the floor .* KiB, .* parameter"):
        model(batch())


def test_a_budget_larger_than_the_device_is_noted() -> None:
    model = torchecho.optimize(Net(), memory_budget="900TiB", lowering="eager")
    model(batch()).backward()
    assert "more than the device has" in torchecho.plans()[-1].notes[0]


@pytest.mark.parametrize("call", [lambda: torchecho.optimize(Net(), memory_bugdet=1), lambda: torchecho.optimize(3)])
def test_wrong_arguments_are_named(call: object) -> None:
    assert callable(call)
    with pytest.raises(torchecho.OptionError, match=r"did you mean 'memory_budget'|takes a torch\.nn\.Module"):
        call()


def test_optimizer_state_counts_before_its_first_step() -> None:
    model = Net()
    weights = sum(p.nbytes for p in model.parameters())
    plain = torchecho.plan(model, (batch(),), max_slowdown=0.0, cost="roofline")
    adam = torchecho.plan(
        model, (batch(),), max_slowdown=0.0, cost="roofline", optimizer=torch.optim.Adam(model.parameters())
    )
    counters = 4 * len(list(model.parameters()))  # Adam counts its steps in one float32 for each parameter
    assert adam.predicted_peak_bytes - plain.predicted_peak_bytes == 2 * weights + counters


def test_plan_on_fake_tensors_is_the_plan_that_runs() -> None:
    model, x = Net(), batch()
    foreseen = torchecho.plan(model, x, cost="roofline", **REFERENCE)
    run_step(torchecho.optimize(model, cost="roofline", **REFERENCE), (x,), model)
    made = torchecho.plans()[-1]
    assert (made.graph_hash, made.schedule) == (foreseen.graph_hash, foreseen.schedule)
    assert foreseen.measured_peak_bytes is None
    assert torchecho.Plan.from_json(foreseen.to_json()) == foreseen


def test_tensor_subclasses_are_planned_by_what_they_hold() -> None:
    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.b(torch.tanh(torch.sigmoid(self.a(x))))).sum()

    planned, gradients = Gates(), []
    x, y = batch(), batch()
    for model, options in ((planned, PLANNED), (copy.deepcopy(planned), REFERENCE)):
        both_inputs = TwoTensor(x.clone(), y.clone()).requires_grad_()
        torchecho.optimize(model, **options)(both_inputs).backward()
        gradients.append([p.grad for p in model.parameters()] + [both_inputs.grad])
    assert torchecho.plans()[-2].num_recomputed > 0
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one.a, other.a)
        assert torch.equal(one.b, other.b)
