"""Steps of other sizes than the planned one: they keep the budget, and recompute no more than it asks for."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchecho
from tests.engine.eager_steps import SIZE, network
from torchecho.engine.door import eager_call
from torchecho.engine.eager import Choice, EagerEngine
from torchecho.engine.planning import Surroundings
from torchecho.meter.probe import PeakProbe
from torchecho.options import parse_options

LONGEST = 12


class Loop(nn.Module):
    """A cell and a head in a loop over the steps of its input, [T, B, SIZE]."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(2 * SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of what the head makes of each state."""
        state, total = torch.zeros_like(x[0]), x.new_zeros(())
        for row in x:
            state = torch.tanh(self.cell(torch.cat([row, state], 1)))
            total = total + torch.sigmoid(self.head(torch.exp(-state))).pow(2).sum()
        return total


def rows_of(rows: int) -> Tensor:
    """Return a batch of some rows."""
    return torch.randn(rows, SIZE)


def steps_of(steps: int) -> Tensor:
    """Return a sequence of some steps."""
    return torch.randn(steps, 64, SIZE)


MODELS: list[tuple[Callable[[], nn.Module], Callable[[int], Tensor], list[int]]] = [
    (network, rows_of, [64, 60, 33, 33, 40, 16, 33, 8, 8, 20, 1, 64]),
    (Loop, steps_of, [LONGEST, 11, 6, 6, 7, 3, 6, 1, 1, 4, LONGEST]),
]


def engine_of(call: Callable[..., Tensor]) -> EagerEngine:
    """Return the engine that a door has bound."""
    found = call.args[1]  # type: ignore[attr-defined]  # what the door binds
    assert isinstance(found, EagerEngine)
    return found


def recomputed(choice: Choice) -> int:
    """Return how many calls of the planned step a choice recomputes."""
    decisions = () if choice.policy is None else choice.policy.decisions
    return sum(decision is not None and decision >= 0 for decision in decisions)


@pytest.mark.parametrize(("make", "batch", "sizes"), MODELS, ids=["rows", "steps"])
def test_smaller_steps_keep_the_budget_and_recompute_less(
    make: Callable[[], nn.Module], batch: Callable[[int], Tensor], sizes: list[int]
) -> None:
    """Sizes come in any order; each step has the bits of plain PyTorch, and none is recorded or planned."""
    torch.manual_seed(0)
    model = make()
    options = parse_options({"memory_budget": 0.75, "cost": "roofline", "strict": True})
    call = eager_call(model, Surroundings(options))
    engine, num_plans = engine_of(call), len(torchecho.plans())
    seen: dict[int, list[int]] = {}
    for size in sizes:
        x = batch(size)
        choice = engine.choose(engine.situation([x]))
        seen.setdefault(size, []).append(recomputed(choice))
        with PeakProbe("cpu") as probe:
            call(x).pow(2).mean().backward()
            peak_bytes = probe.read()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        model(x).pow(2).mean().backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), found, strict=True))
        model.zero_grad()
        plan = torchecho.plans()[num_plans]
        if plan.measured_peak_bytes is not None:
            (planned,) = engine.plans.values()
            assert planned is not None
            assert planned.start_bytes + peak_bytes <= plan.budget_bytes
    assert len(torchecho.plans()) == num_plans + 1
    assert plan.num_recomputed
    largest, smallest = max(sizes), min(sizes)
    del seen[largest][0]  # that of the step that was recorded
    for size, counts in seen.items():
        assert counts == sorted(counts, reverse=True), f"steps of size {size} recompute more than before"
    assert seen[smallest][-1] < seen[largest][-1]


def test_step_without_recomputation_is_left_alone() -> None:
    """Where a step is so small that everything fits, nobody looks at it any more once that is known."""
    model = network()
    options = parse_options({"memory_budget": 0.75, "cost": "roofline", "strict": True})
    call = eager_call(model, Surroundings(options))
    engine = engine_of(call)
    for rows in (64, 4, 4):
        call(rows_of(rows)).mean().backward()
        model.zero_grad()
    assert engine.choose(engine.situation([rows_of(4)])).is_idle
    assert engine.choose(engine.situation([rows_of(3)])).is_idle
    assert not engine.choose(engine.situation([rows_of(5)])).is_idle


def test_larger_steps_are_recorded() -> None:
    model = network()
    call = eager_call(model, Surroundings(parse_options({"max_slowdown": 100.0, "cost": "roofline", "strict": True})))
    call(rows_of(32)).mean().backward()
    model.zero_grad()
    engine = engine_of(call)
    chosen = [engine.choose(engine.situation([rows_of(rows)])).records for rows in (32, 31, 33)]
    assert chosen == [False, False, True]
