"""Search the decisions of a graph for every budget at once: a portfolio over exact simulation, kept in an archive.

Every candidate is simulated, and the simulated peak is the only one that counts. The search never looks at the budget:
the same graph gives the same archive, so that a smaller budget never gets a faster plan and a larger one never a
slower. Its effort is counted in simulated steps, not in seconds.

Source: portfolio, exact simulation and archive as in docs/planners.md.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchecho.cost.model import OpCosts
from torchecho.errors import ScheduleError
from torchecho.ir.graph import TrainingGraph
from torchecho.ir.schedule import Schedule
from torchecho.planner.decisions import SINGLE_COPY, Decisions, Needs, build_schedule, find_needs, save_all
from torchecho.planner.repetition import Ranks, find_classes, ranks
from torchecho.simulate.replay import ReplayTables, live_bytes, replay_tables

_MIN_OPS_OF_SHORT_SEARCH = 1_000  # the whole search of a smaller graph takes about half a second
_STEPS_OF_EVALUATION = 4_000  # what one evaluation costs besides its steps
_MAX_GROWTH = 3  # a schedule may have this many times the steps of the untouched one


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a search may do.

    Attributes:
        steps: Steps that may be simulated in all.
        hull_solves: Closures that may be solved for the hull.
        segment_solves: The same for each way to cut the forward into segments.
    """

    steps: int
    hull_solves: int
    segment_solves: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One simulated choice: its peak, the seconds it adds, the decisions behind it, how many choices came before."""

    peak_bytes: int
    added_seconds: float
    decisions: Decisions
    origin: str
    number: int


@dataclass
class Search:
    """The state of one search: what has been simulated, and how much may still be.

    Attributes:
        copy_seconds: What running each op again adds to the step.
        effort: What may be done in all.
        spent: Steps that have been simulated.
    """

    graph: TrainingGraph
    costs: OpCosts
    needs: Needs
    tables: ReplayTables
    copy_seconds: npt.NDArray[np.float64]
    classes: tuple[tuple[int, ...], ...]
    rank: Ranks
    windows: tuple[int, ...]
    baseline_seconds: float
    baseline_counts: npt.NDArray[np.int64]
    effort: Effort
    spent: int = 0
    seen: dict[Decisions, Candidate] = field(default_factory=dict)

    @property
    def untouched(self) -> Candidate:
        """The candidate that stashes everything."""
        return next(iter(self.seen.values()))

    @property
    def is_spent(self) -> bool:
        """Whether the effort is used up."""
        return self.spent >= self.effort.steps

    def share_of_rest(self, share: float) -> int:
        """Return what will be spent when `share` of what is left has been used."""
        return self.spent + int(share * max(self.effort.steps - self.spent, 0))

    def schedule(self, decisions: Decisions) -> Schedule:
        """Return the schedule of decisions."""
        return build_schedule(self.needs, decisions)

    def simulate(self, decisions: Decisions, origin: str) -> Candidate:
        """Return the candidate of decisions, simulated once; one with too many copies never beats another."""
        known = self.seen.get(decisions)
        if known is not None:
            return known
        max_steps = _MAX_GROWTH * len(self.graph.kernels)
        try:
            schedule = build_schedule(self.needs, decisions, max_steps)
        except ScheduleError:
            candidate = Candidate(2**62, float("inf"), decisions, origin, len(self.seen))
            self.spent += max_steps
        else:
            peak = int(live_bytes(self.tables, schedule).max(initial=self.graph.fixed_bytes))
            # counted against the untouched step op by op: the same ops in another order add exactly nothing
            more = np.bincount(schedule.ops, minlength=len(self.copy_seconds)) - self.baseline_counts
            seconds = float(more @ self.copy_seconds)
            candidate = Candidate(peak, seconds, decisions, origin, len(self.seen))
            self.spent += len(schedule.steps) + _STEPS_OF_EVALUATION
        self.seen[decisions] = candidate
        return candidate


def whole_effort(graph: TrainingGraph) -> Effort:
    """Return the effort of a whole search."""
    steps = max(4_500_000, 96 * _steps_of_evaluation(graph))
    return Effort(steps, hull_solves=48, segment_solves=8)


def short_effort(graph: TrainingGraph) -> Effort | None:
    """Return the effort of a short search, which finds nearly the same plans; None where the whole one is short."""
    num_ops = len(graph.kernels)
    if num_ops < _MIN_OPS_OF_SHORT_SEARCH:
        return None
    evaluations = max(64, 1_000_000 // num_ops)  # as many as take some 0.2 s
    steps = min(2_500_000, evaluations * _steps_of_evaluation(graph))
    return Effort(steps, hull_solves=16, segment_solves=4)


def _steps_of_evaluation(graph: TrainingGraph) -> int:
    return len(graph.kernels) + _STEPS_OF_EVALUATION


def start_search(graph: TrainingGraph, costs: OpCosts, effort: Effort | None = None) -> Search:
    """Prepare a search and simulate the untouched step.

    Args:
        graph: Graph to search.
        costs: Of its ops.
        effort: What may be done; None for a whole search.
    """
    needs = find_needs(graph)
    classes = find_classes(graph, needs)
    everything = build_schedule(needs, save_all(graph))
    search = Search(
        graph=graph,
        costs=costs,
        needs=needs,
        tables=replay_tables(graph, costs.workspace_bytes),
        copy_seconds=np.array([costs.copy_seconds(graph, op) for op in range(len(graph.ops))]),
        classes=classes,
        rank=ranks(classes),
        windows=_windows(1 + needs.clock[-1] - needs.clock[0] if needs.clock else 0),
        baseline_seconds=float(np.array(costs.seconds)[everything.ops].sum()),
        baseline_counts=np.bincount(everything.ops, minlength=len(graph.ops)),
        effort=effort or whole_effort(graph),
    )
    search.simulate(save_all(graph), "stash everything")
    return search


def _windows(ticks: int) -> tuple[int, ...]:
    """Return the reuse windows to try: unlimited, a few layers or time steps, about one, and none at all."""
    return tuple(dict.fromkeys((SINGLE_COPY, max(ticks // 12, 8), max(ticks // 64, 4), 1)))


def pareto(search: Search) -> list[Candidate]:
    """Return the candidates that no other beats in both peak and added seconds, largest peak first."""
    kept: list[Candidate] = []
    for candidate in sorted(search.seen.values(), key=lambda c: (c.added_seconds, c.peak_bytes)):
        if not kept or candidate.peak_bytes < kept[-1].peak_bytes:
            kept.append(candidate)
    return kept


def corners(front: list[Candidate]) -> list[Candidate]:
    """Return the vertices of the lower convex hull of a Pareto set, in its order."""
    hull: list[Candidate] = []
    for candidate in front:
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], candidate):
            hull.pop()
        hull.append(candidate)
    return hull


def _is_above(middle: Candidate, left: Candidate, right: Candidate) -> bool:
    """Return whether `middle` lies on or above the line from `left` to `right`."""
    rise = (right.added_seconds - left.added_seconds) * (left.peak_bytes - middle.peak_bytes)
    return (middle.added_seconds - left.added_seconds) * (left.peak_bytes - right.peak_bytes) >= rise
