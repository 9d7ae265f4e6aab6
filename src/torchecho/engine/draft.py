"""A recorded step that is ready to be planned, in whatever process, and what its plan means call by call."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from torchecho.apply.policy import FOLLOW, Policy, kept_as_it_is
from torchecho.capture.lives import LEFT_OVER
from torchecho.capture.place import Place
from torchecho.capture.tape_graph import TapeCapture
from torchecho.cost.model import OpCosts
from torchecho.ir.graph import TrainingGraph
from torchecho.planner.plan import Plan
from torchecho.planner.request import PlanRequest, answer


@dataclass(frozen=True)
class Draft:
    """What of a recorded step is left to keep when its graph is priced.

    Attributes:
        graph: With the optimizer's step.
        costs: Of its ops.
        request: What is asked of the planner.
        calls_of_op: For each op the positions of the forward's calls that it stands for.
        calls: What the forward called, in order.
        places: Where in the program these calls stand.
        start_bytes: Bytes that were alive when the step began.
    """

    graph: TrainingGraph
    costs: OpCosts
    request: PlanRequest
    calls_of_op: tuple[tuple[int, ...], ...]
    calls: tuple[Any, ...]
    places: tuple[Place, ...]
    start_bytes: int

    def plan(self, effort: int | None = None) -> Plan:
        """Return the plan; `effort` is that of `make_archive`.

        Raises:
            BudgetError: no plan keeps the step inside the budget.
        """
        return answer(self.graph, self.costs, self.request, effort)

    def without_left_over(self) -> Self | None:
        """Return the draft for a program that holds nothing of the step before; None where there is no other."""
        storages = self.graph.storages
        if not any(storage.name == LEFT_OVER and storage.size_bytes for storage in storages):
            return None
        lighter = tuple(replace(s, size_bytes=0) if s.name == LEFT_OVER else s for s in storages)
        return replace(self, graph=replace(self.graph, storages=lighter))

    def task(self) -> Callable[[], Plan]:
        """Return what makes the plan, as something that can be pickled."""
        return functools.partial(answer, self.graph, self.costs, self.request)

    def policy(self, windows: Iterable[tuple[int, int]]) -> Policy:
        """Return what to do at each call of the forward, from the reuse windows of the ops to recompute."""
        decisions = [kept_as_it_is(func) for func in self.calls]
        worth = [0.0] * len(self.calls)
        for op, window in windows:
            first, *rest = self.calls_of_op[op]
            decisions[first] = window
            worth[first] = self._worth(op)
            for position in rest:
                decisions[position] = FOLLOW
        return Policy(self.calls, tuple(decisions), self.places, tuple(worth))

    def _worth(self, op: int) -> float:
        """Return the seconds that an op takes per byte that it makes."""
        made_bytes = sum(self.graph.storages[storage].size_bytes for storage in self.graph.ops[op].writes)
        return self.costs.seconds[op] / max(made_bytes, 1)


def draft_of(capture: TapeCapture, graph: TrainingGraph, costs: OpCosts, request: PlanRequest) -> Draft:
    """Return the draft of a captured step."""
    recording = capture.recording
    calls, places = tuple(recording.forward_calls), tuple(recording.forward_places)
    return Draft(graph, costs, request, capture.calls_of_op, calls, places, capture.start_bytes)
