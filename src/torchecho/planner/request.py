"""What is asked of the planner, as plain data that any process can answer."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torchecho.cost.model import OpCosts
from torchecho.errors import BudgetError
from torchecho.ir.graph import TrainingGraph
from torchecho.planner.alternatives import floor_bytes, make_plan_among
from torchecho.planner.plan import Plan
from torchecho.planner.planner import Archive, budget_in_bytes, make_archive
from torchecho.planner.search import Effort
from torchecho.units import format_bytes


class Part(Enum):
    """How much of the step a graph is: all of it, or a piece between graph breaks or backwards; or a later step."""

    WHOLE = "whole"
    MORE_FOLLOWS = "more follows"
    LAST = "last"
    OF_OTHER_SIZE = "of another size"
    SHARED = "shared with another backward"


_SPLIT = "a graph break splits the step; this piece is at its floor, over its share"
_OVER = {
    Part.MORE_FOLLOWS: _SPLIT,
    Part.LAST: _SPLIT,
    Part.SHARED: "what it saves for another backward is kept; it runs at its floor, over the budget",
    Part.OF_OTHER_SIZE: "steps of this size do not fit the budget; they run at their floor",
}


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan.

    Attributes:
        budget: Bytes, or a float in (0, 1]: a fraction of the untouched step's peak; None for no budget.
        max_slowdown: Most added seconds, as a fraction of the untouched step's; None for no limit.
        name: What the plan is called.
        part: How much of the step the graph is.
        device_bytes: What the device has in all; None where that is not known.
    """

    budget: float | None
    max_slowdown: float | None
    name: str
    part: Part = Part.WHOLE
    device_bytes: int | None = None


def answer(graph: TrainingGraph, costs: OpCosts, request: PlanRequest, effort: Effort | None = None) -> Plan:
    """Search a graph and plan it; `effort` is that of `make_archive`.

    Raises:
        BudgetError: no plan keeps the whole step inside the budget.
    """
    return answer_among([make_archive(graph, costs, effort)], request)[1]


def answer_among(archives: Sequence[Archive], request: PlanRequest) -> tuple[int, Plan]:
    """Plan by the archives of graphs that compute the same, of which the first is the untouched step.

    A piece that more pieces follow takes at most half of the room that the budget leaves, for theirs. A piece that
    cannot keep to the budget goes as low as it can, with a note, and so does a step of another size than the first; the
    first whole step raises.

    Returns:
        Which archive the plan is of, and the plan.

    Raises:
        BudgetError: no plan keeps the whole step inside the budget.
    """
    untouched = archives[0]
    budget = budget_in_bytes(untouched, request.budget)
    if budget is not None and request.part == Part.MORE_FOLLOWS:
        fixed_bytes = untouched.search.graph.fixed_bytes
        budget -= max(budget - fixed_bytes, 0) // 2
    try:
        place, plan = make_plan_among(archives, budget, request.max_slowdown, name=request.name)
    except BudgetError:
        if request.part == Part.WHOLE:
            raise
        place, plan = make_plan_among(archives, floor_bytes(archives), None, name=request.name)
        plan = with_note(plan, _OVER[request.part])
    if budget is not None and request.device_bytes is not None and budget > request.device_bytes:
        device = format_bytes(request.device_bytes)
        plan = with_note(plan, f"the budget {format_bytes(budget)} is more than the device has ({device})")
    return place, plan


def with_note(plan: Plan, note: str) -> Plan:
    """Return the plan with one more note."""
    return dataclasses.replace(plan, notes=(*plan.notes, note))
