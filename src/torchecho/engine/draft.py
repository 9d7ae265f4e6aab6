"""From a recorded step to what can be planned, in whatever process, and what its plan means call by call."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torchecho.apply.policy import FOLLOW, Policy, kept_as_it_is
from torchecho.capture.lives import LEFT_OVER
from torchecho.capture.place import Place
from torchecho.capture.recording import Recording
from torchecho.capture.tape_graph import TapeCapture, build_graph, step_device
from torchecho.cost.model import OpCosts
from torchecho.cost.scaled import Scaled
from torchecho.engine.planning import Surroundings, request_of, whole_step, with_budget_in_bytes
from torchecho.engine.ranks import same_on_every_rank
from torchecho.ir.graph import TrainingGraph
from torchecho.meter.pricing import price, price_alike, scaled_costs
from torchecho.planner.plan import Plan
from torchecho.planner.request import Part, PlanRequest, answer, with_note
from torchecho.planner.search import Effort

# To write, find and run one, and to watch the call: what a recomputed call adds in `torchecho bench eager`.
_RECIPE_SECONDS = 60e-6
NOTHING_LEFT_OVER = "it fits if the program lets go of what the model returned before it calls the model again"


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
        note: What the plan takes for granted.
    """

    graph: TrainingGraph
    costs: OpCosts
    request: PlanRequest
    calls_of_op: tuple[tuple[int, ...], ...]
    calls: tuple[Any, ...]
    places: tuple[Place, ...]
    start_bytes: int
    note: str = ""

    def plan(self, effort: Effort | None = None) -> Plan:
        """Return the plan; `effort` is that of `make_archive`.

        Raises:
            BudgetError: no plan keeps the step inside the budget.
        """
        return self.noted(answer(self.graph, self.costs, self.request, effort))

    def noted(self, plan: Plan) -> Plan:
        """Return a plan of this draft with what it takes for granted."""
        return with_note(plan, self.note) if self.note else plan

    def without_left_over(self) -> Self | None:
        """Return the draft for a program that holds nothing of the step before; None where there is no other."""
        storages = self.graph.storages
        if not any(storage.name == LEFT_OVER and storage.size_bytes for storage in storages):
            return None
        lighter = tuple(replace(s, size_bytes=0) if s.name == LEFT_OVER else s for s in storages)
        return replace(self, graph=replace(self.graph, storages=lighter), note=NOTHING_LEFT_OVER)

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
        """Return the seconds that recomputing an op takes per byte that it makes."""
        made_bytes = sum(self.graph.storages[storage].size_bytes for storage in self.graph.ops[op].writes)
        return self.costs.copy_seconds(self.graph, op) / max(made_bytes, 1)


@dataclass
class Drafter:
    """Drafts the steps of one program: prices the first, and those of other sizes by what that has told."""

    surroundings: Surroundings
    name: str
    _known: Scaled | None = None
    _in_bytes: Surroundings = field(init=False)

    def __post_init__(self) -> None:
        self._in_bytes = self.surroundings  # until a first plan has found what the budget "auto" is

    @property
    def knows_costs(self) -> bool:
        """Whether a first step has been priced."""
        return self._known is not None

    def first(self, recording: Recording) -> Draft:
        """Price a step; what that finds out is known of steps of other sizes, too."""
        capture, device = self._graph(recording), step_device(recording)
        graph, may_run = capture.graph, self.surroundings.may_run
        costs = price(graph, capture.call, cost=self.surroundings.options.cost, device=device, may_run=may_run)
        costs = same_on_every_rank(graph, costs)
        self._known = scaled_costs(graph, costs, device, may_run=may_run)
        self._in_bytes = with_budget_in_bytes(self.surroundings, device)
        return self._draft(capture, costs, Part.SHARED if recording.is_partial else Part.WHOLE)

    def alike(self, recording: Recording) -> Draft:
        """Price a step of another size than the first without running anything."""
        assert self._known is not None, "the first step is priced before any other"
        capture, cost = self._graph(recording), self.surroundings.options.cost
        costs = price_alike(capture.graph, self._known, cost=cost, device=step_device(recording))
        return self._draft(capture, costs, Part.OF_OTHER_SIZE)

    def _draft(self, capture: TapeCapture, costs: OpCosts, part: Part) -> Draft:
        recording = capture.recording
        return Draft(
            graph=whole_step(capture.graph, self.surroundings),
            costs=replace(costs, recipe_seconds=_RECIPE_SECONDS),
            request=request_of(self._in_bytes, step_device(recording), name=self.name, part=part),
            calls_of_op=capture.calls_of_op,
            calls=tuple(recording.forward_calls),
            places=tuple(recording.forward_places),
            start_bytes=capture.start_bytes,
        )

    def _graph(self, recording: Recording) -> TapeCapture:
        optimizer = self.surroundings.optimizer
        return build_graph(
            recording,
            base_bytes=optimizer.state_bytes,
            model_bytes=self.surroundings.model_bytes,
            state_bytes=optimizer.present_bytes,
        )
