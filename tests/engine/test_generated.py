"""The Inductor lowering: the same bits, the predicted peak at every budget, and what happens where it cannot plan."""

import copy
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import torchecho
from tests.end_to_end.models import Block, CellLoop, Convolutions, Loss
from tests.end_to_end.steps import Left, differences, run_step
from torchecho.engine import generated
from torchecho.errors import BudgetError, CaptureError, EchoError, EchoWarning
from torchecho.planner.plan import Plan


class Tails(nn.Module):
    """A width that no vector divides, so that every kernel has a tail, and dropout between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(37, 37) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 37) to (B, 37)."""
        for layer in self.layers:
            x = F.dropout(torch.softmax(F.gelu(layer(x)), -1), 0.3, self.training)
        return x


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tails and dropout": (lambda: Loss(Tails()), (33, 37)),
    "attention": (lambda: Loss(Block(fused=False)), (4, 12, 32)),
    "fused attention": (lambda: Loss(Block(fused=True)), (4, 12, 32)),
    "convolutions": (lambda: Loss(Convolutions()), (2, 3, 16, 16)),
    "cell loop": (lambda: Loss(CellLoop()), (3, 4, 16)),
    "lstm": (lambda: Loss(nn.LSTM(12, 16)), (3, 3, 12)),
}


SMALL = CASES["tails and dropout"]


@pytest.fixture(autouse=True, scope="module")
def _inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile into a folder of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def step(build: Callable[[], nn.Module], shape: tuple[int, ...], **options: object) -> tuple[Left, Plan]:
    """Do one step in a fresh compile by Inductor and return what it left, and its plan with the measured peak."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = build(), (torch.randn(*shape),)
    torchecho.optimize(model, **{"lowering": "inductor", "strict": True, **options})
    left = run_step(model, inputs, model)
    return copy.deepcopy(left), torchecho.plans()[-1]


@pytest.mark.parametrize("name", CASES)
def test_step_is_bit_identical_and_exact_at_every_budget(name: str) -> None:
    reference, untouched = step(*CASES[name], max_slowdown=0.0)
    assert untouched.lowering == "inductor"
    assert untouched.measured_peak_bytes == untouched.predicted_peak_bytes
    peaks = [peak for peak, _ in untouched.frontier]
    for budget in sorted({peaks[-1], peaks[len(peaks) // 2]}, reverse=True):
        left, plan = step(*CASES[name], memory_budget=budget)
        assert differences(reference, left) == []
        assert plan.measured_peak_bytes == plan.predicted_peak_bytes
        assert plan.predicted_peak_bytes <= budget
    if name == "attention":
        assert plan.num_recomputed > 0


def test_compiling_again_takes_the_kernels_from_the_cache_and_still_has_a_plan() -> None:
    step(*SMALL, max_slowdown=0.0)
    torch._dynamo.reset()
    counters.clear()
    before = len(torchecho.plans())
    _, plan = step(*SMALL, memory_budget=1.0)
    assert counters["inductor"]["fxgraph_cache_hit"] == 2
    assert len(torchecho.plans()) == before + 1
    assert plan.measured_peak_bytes == plan.predicted_peak_bytes


def test_unreachable_budget_raises_unchanged_and_names_the_floor() -> None:
    model, shape = SMALL[0](), SMALL[1]
    compiled = torch.compile(model, backend="torchecho", options={"lowering": "inductor", "memory_budget": "1KiB"})
    with pytest.raises(BudgetError, match="below the floor"):
        compiled(torch.randn(*shape))


def test_evaluation_runs_without_a_plan() -> None:
    torch.manual_seed(0)
    model, x = SMALL[0]().eval(), torch.randn(*SMALL[1])
    expected = model(x)
    torchecho.optimize(model, lowering="inductor", strict=True)
    before = len(torchecho.plans())
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert len(torchecho.plans()) == before


def test_backward_may_run_twice_over_a_retained_graph() -> None:
    torch.manual_seed(0)
    model = torchecho.optimize(SMALL[0](), lowering="inductor", strict=True, max_slowdown=0.5)
    loss = model(torch.randn(*SMALL[1]))
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for parameter, first in zip(model.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, 2 * first)


def test_code_that_cannot_be_planned_is_lowered_eagerly_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CaptureError("a kernel of another kind")

    monkeypatch.setattr(generated, "record", refuse)
    with pytest.warns(EchoWarning, match="lowered eagerly: .*a kernel of another kind") as warned:
        _, plan = step(*SMALL, strict=False, max_slowdown=0.0)
    assert len(warned) == 1
    assert plan.lowering != "inductor"
    with pytest.raises(EchoError, match="a kernel of another kind"):
        step(*SMALL, max_slowdown=0.0)


def test_auto_tells_once_why_it_lowers_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torchecho.engine.lowering._has_compiler", lambda: False)
    caplog.set_level(logging.INFO, "torchecho")
    _, plan = step(*SMALL, engine="compile", lowering="auto", max_slowdown=0.0)
    assert plan.lowering != "inductor"
    notes = [r.message for r in caplog.records if "lowered eagerly" in r.message]
    assert len(notes) == 1
    assert notes[0].endswith("no C++ compiler was found")
