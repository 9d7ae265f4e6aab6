"""The promise of the eager engine: the bits of plain PyTorch, at the predicted peak, inside the budget."""

import copy

import pytest
import torch

import torchecho
from tests.end_to_end.models import CASES, Case
from tests.end_to_end.steps import Left, differences, run_step
from torchecho.planner.plan import Plan

STEPS = 3


def steps_of(case: Case, **options: object) -> tuple[list[Left], Plan | None]:
    """Do some steps of a case, as it is or optimized, and return what each left, and the plan."""
    torch.manual_seed(0)
    model, inputs = case.build(), case.inputs()
    if options:
        torchecho.optimize(model, engine="eager", strict=True, **options)
    left = []
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        left.append(copy.deepcopy(run_step(model, inputs, model)))
    return left, torchecho.plans()[-1] if options else None


def _budgets(frontier: tuple[tuple[int, float], ...]) -> list[int]:
    """Return the tightest peak and two between, where there are any."""
    peaks = [peak for peak, _ in frontier]
    return sorted({peaks[-1], peaks[len(peaks) // 2], peaks[len(peaks) // 4]})


@pytest.mark.filterwarnings("ignore:.*over the budget:torchecho.errors.EchoWarning")
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_plain_pytorch_and_exact_at_every_budget(name: str) -> None:
    case = CASES[name]
    plain, _ = steps_of(case)
    left, untouched = steps_of(case, max_slowdown=0.0)
    assert [differences(a, b) for a, b in zip(plain, left, strict=True)] == [[]] * STEPS
    for budget in _budgets(untouched.frontier):
        left, plan = steps_of(case, memory_budget=budget)
        assert [differences(a, b) for a, b in zip(plain, left, strict=True)] == [[]] * STEPS
        assert plan.measured_peak_bytes is not None
        assert plan.measured_peak_bytes <= budget
        assert abs(plan.measured_peak_bytes / plan.predicted_peak_bytes - 1) <= 0.01
