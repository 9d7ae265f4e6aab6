"""Steps of other sizes than the planned one: they keep the budget, and recompute no more than it asks for."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchecho
from tests.engine.eager_steps import SIZE, network
from torchecho.engine import eager
from torchecho.engine.choice import Choice
from torchecho.engine.door import eager_call
from torchecho.engine.eager import EagerEngine
from torchecho.engine.planning import Surroundings
from torchecho.meter.probe import PeakProbe
from torchecho.options import parse_options
from torchecho.units import format_bytes

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

GROWING: list[tuple[Callable[[], nn.Module], Callable[[int], Tensor], list[int]]] = [
    (network, rows_of, [64, 70, 70, 66, 80, 80, 72]),
    (Loop, steps_of, [LONGEST, 13, 13, 14, 15, 14, 15]),
]


def engine_of(call: Callable[..., Tensor]) -> EagerEngine:
    """Return the engine that a door has bound."""
    found = call.args[1]  # type: ignore[attr-defined]  # what the door binds
    assert isinstance(found, EagerEngine)
    return found


def peak_of_step(model: nn.Module, call: Callable[..., Tensor], x: Tensor) -> int:
    """Do a step, which has the bits of plain PyTorch, and return its peak above what was there."""
    with PeakProbe("cpu") as probe:
        call(x).pow(2).mean().backward()
        peak_bytes = probe.read()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).pow(2).mean().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), found, strict=True))
    model.zero_grad()
    return peak_bytes


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
        peak_bytes = peak_of_step(model, call, x)
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


def test_only_much_larger_steps_are_recorded() -> None:
    model = network()
    call = eager_call(model, Surroundings(parse_options({"max_slowdown": 100.0, "cost": "roofline", "strict": True})))
    call(rows_of(32)).mean().backward()
    model.zero_grad()
    engine = engine_of(call)
    chosen = [engine.choose(engine.situation([rows_of(rows)])).records for rows in (32, 31, 33, 40, 41)]
    assert chosen == [False, False, False, False, True]


def test_steps_of_another_kind_are_recorded() -> None:
    """Other numbers of dimensions or tensors, or gradients that are there: no plan tells of such steps."""
    model = network()
    call = eager_call(model, Surroundings(parse_options({"max_slowdown": 100.0, "cost": "roofline", "strict": True})))
    engine = engine_of(call)
    call(rows_of(32)).mean().backward()
    assert engine.choose(engine.situation([rows_of(32)])).records
    model.zero_grad()
    assert not engine.choose(engine.situation([rows_of(32)])).records
    assert engine.choose(engine.situation([rows_of(8)[None]])).records
    assert engine.choose(engine.situation([rows_of(8), rows_of(8)])).records


def test_steps_of_another_kind_are_not_weighed_where_there_are_plans_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_MOST_PLANS", 1)
    model = network()
    call = eager_call(model, Surroundings(parse_options({"memory_budget": 0.75, "cost": "roofline", "strict": True})))
    engine = engine_of(call)
    call(rows_of(64)).mean().backward()
    with_gradients = engine.choose(engine.situation([rows_of(64)]))
    assert not with_gradients.records
    assert with_gradients.learns is None
    assert with_gradients.policy is not None
    model.zero_grad()
    assert engine.choose(engine.situation([rows_of(70)])).learns is not None


@pytest.mark.parametrize(("make", "batch", "sizes"), GROWING, ids=["rows", "steps"])
def test_somewhat_larger_steps_keep_the_budget_and_are_not_planned(
    make: Callable[[], nn.Module], batch: Callable[[int], Tensor], sizes: list[int]
) -> None:
    """What fits is not recorded; what does not, is recorded the next time."""
    torch.manual_seed(0)
    model = make()
    call = eager_call(model, Surroundings(parse_options({"memory_budget": 0.9, "cost": "roofline", "strict": True})))
    engine, num_plans = engine_of(call), len(torchecho.plans())
    call(batch(sizes[0])).pow(2).mean().backward()
    model.zero_grad()
    plan = torchecho.plans()[num_plans]
    (planned,) = engine.plans.values()
    assert planned is not None
    for size in sizes[1:]:
        x = batch(size)
        larger_bytes = x.nbytes - batch(sizes[0]).nbytes
        assert not engine.choose(engine.situation([x])).records
        peak_bytes = planned.start_bytes + larger_bytes + peak_of_step(model, call, x)
        assert plan.budget_bytes is not None
        is_over = peak_bytes > plan.budget_bytes
        assert engine.choose(engine.situation([x])).records == is_over
    assert len(torchecho.plans()) == num_plans + 1


def _tight(model: nn.Module, x: Tensor) -> Callable[..., Tensor]:
    """Return the call of a model under the smallest budget that steps like this one can keep."""
    options = {"cost": "roofline", "strict": True}
    call = eager_call(model, Surroundings(parse_options({"memory_budget": 0.75, **options})))
    call(x).mean().backward()
    model.zero_grad()
    budget = torchecho.plans()[-1].floor_bytes
    return eager_call(model, Surroundings(parse_options({"memory_budget": budget, **options})))


def test_first_step_over_the_budget_says_what_it_took() -> None:
    model, x = network(), rows_of(64)
    call = _tight(model, x)
    with PeakProbe("cpu") as probe:
        with pytest.warns(torchecho.EchoWarning, match="the first step, which ran before") as told:
            call(x).mean().backward()
        peak_bytes = probe.read()
    (planned,) = engine_of(call).plans.values()
    assert planned is not None
    took = format_bytes(planned.start_bytes + peak_bytes)
    message = str(told[0].message)
    assert f"the first step, which ran before there was a plan, took {took}, over the budget" in message
    assert message.endswith("predicted): raise the budget to that")  # the door takes no example of the batch


def test_first_step_over_the_budget_advises_what_the_door_offers() -> None:
    model, x = network(), rows_of(64)
    _tight(model, x)
    budget = torchecho.plans()[-1].floor_bytes
    model.zero_grad()
    optimized = torchecho.optimize(model, memory_budget=budget, cost="roofline")
    with pytest.warns(
        torchecho.EchoWarning, match=r"to that, or plan this step .* by optimize\(\.\.\., largest=example\)$"
    ):
        optimized(x).mean().backward()


@pytest.mark.filterwarnings("ignore:.*the first step, .* over the budget:torchecho.EchoWarning")
def test_larger_step_that_was_over_the_budget_is_recorded_the_next_time() -> None:
    model = network()
    call = _tight(model, rows_of(64))
    engine = engine_of(call)
    for rows in (64, 76):
        x = rows_of(rows)
        assert engine.choose(engine.situation([x])).records == (rows == 64)
        call(x).mean().backward()
        model.zero_grad()
    assert engine.choose(engine.situation([x])).records
