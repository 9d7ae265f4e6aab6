"""Search the decisions of a graph for every budget at once: a portfolio over exact simulation, kept in an archive.

Seeds: stash everything; the vertices of the price-per-byte closure's hull, each with one copy a recomputed op and with
copies dropped after a short and a long reuse window. Between neighbours: shares and strides of every class of repeated
ops. Then moves guided by the peak: recompute a class that is live at the peak, or keep a class back that no peak needs
gone. Every candidate is simulated, and the simulated peak is the only one that counts.

The search never looks at the budget: the same graph gives the same archive, so that a smaller budget never gets a faster
plan and a larger one never a slower. Its effort is counted in simulated ops, not in seconds.

Source: portfolio, exact simulation and archive as in docs/planners.md.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from torchecho.cost.model import OpCosts
from torchecho.ir.graph import TrainingGraph
from torchecho.ir.schedule import Schedule
from torchecho.plan.closure import ClosureSolution, closure_hull, closure_problem
from torchecho.plan.decisions import SINGLE_COPY, Decisions, Needs, build_schedule, find_needs, save_all
from torchecho.plan.repetition import blend_prefix, blend_stride, find_classes, ranks, with_class
from torchecho.simulate.replay import ReplayTables, find_copies, live_bytes, replay_tables

_EFFORT_OPS = 6_000_000
_MIN_EVALUATIONS, _MAX_EVALUATIONS = 128, 800
_MOVES = 6
_STRIDES = (2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One simulated choice: its peak, the seconds it adds to the step, and the decisions behind it."""

    peak_bytes: int
    added_seconds: float
    decisions: Decisions
    origin: str


@dataclass
class Search:
    """The state of one search: what has been simulated, and how much may still be."""

    graph: TrainingGraph
    costs: OpCosts
    needs: Needs
    tables: ReplayTables
    seconds: "np.ndarray[tuple[int], np.dtype[np.float64]]"
    classes: tuple[tuple[int, ...], ...]
    rank: tuple[tuple[int, int], ...]
    windows: tuple[int, ...]
    baseline_seconds: float
    max_evaluations: int
    seen: dict[Decisions, Candidate] = field(default_factory=dict)

    @property
    def is_spent(self) -> bool:
        """Whether the effort is used up."""
        return len(self.seen) >= self.max_evaluations

    def schedule(self, decisions: Decisions) -> Schedule:
        """Return the schedule of decisions."""
        return build_schedule(self.needs, decisions)

    def simulate(self, decisions: Decisions, origin: str) -> Candidate:
        """Return the candidate of decisions, simulated once."""
        known = self.seen.get(decisions)
        if known is not None:
            return known
        schedule = self.schedule(decisions)
        peak = int(live_bytes(self.tables, schedule).max(initial=self.graph.fixed_bytes))
        seconds = float(self.seconds[list(schedule.steps)].sum()) - self.baseline_seconds
        candidate = Candidate(peak, seconds, decisions, origin)
        self.seen[decisions] = candidate
        return candidate


def start_search(graph: TrainingGraph, costs: OpCosts) -> Search:
    """Prepare a search: needs, classes, tables and the untouched step's time."""
    needs = find_needs(graph)
    classes = find_classes(graph, needs)
    seconds = np.array(costs.seconds, dtype=np.float64)
    everything = build_schedule(needs, save_all(graph))
    num_kernels = max(len(graph.kernels), 1)
    return Search(
        graph=graph,
        costs=costs,
        needs=needs,
        tables=replay_tables(graph, costs.workspace_bytes),
        seconds=seconds,
        classes=classes,
        rank=ranks(classes, len(graph.ops)),
        windows=_windows(len(needs.backward)),
        baseline_seconds=float(seconds[list(everything.steps)].sum()),
        max_evaluations=min(max(_EFFORT_OPS // num_kernels, _MIN_EVALUATIONS), _MAX_EVALUATIONS),
    )


def _windows(num_backward: int) -> tuple[int, ...]:
    """Return the reuse windows to try: unlimited, about a layer or time step, and a few of them."""
    return tuple(dict.fromkeys((SINGLE_COPY, max(num_backward // 12, 8), max(num_backward // 64, 4), 1)))


def explore(search: Search) -> list[Candidate]:
    """Run the whole portfolio and return the Pareto set: peaks falling, added seconds rising."""
    search.simulate(save_all(search.graph), "stash everything")
    seeds = _closure_seeds(search)
    _blend(search, seeds)
    _climb(search)
    return pareto(search)


def pareto(search: Search) -> list[Candidate]:
    """Return the candidates that no other beats in both peak and added seconds, largest peak first."""
    kept: list[Candidate] = []
    for candidate in sorted(search.seen.values(), key=lambda c: (c.added_seconds, c.peak_bytes)):
        if not kept or candidate.peak_bytes < kept[-1].peak_bytes:
            kept.append(candidate)
    return kept


def _closure_seeds(search: Search) -> list[Decisions]:
    problem = closure_problem(search.graph, search.needs, search.costs)
    vertices, _ = closure_hull(problem, max_solves=48)
    seeds = []
    for vertex in vertices:
        for window in search.windows:
            if search.is_spent:
                return seeds
            decisions = _decisions(search, vertex, window)
            search.simulate(decisions, f"closure, window {window}")
            seeds.append(decisions)
    return seeds


def _decisions(search: Search, vertex: ClosureSolution, window: int) -> Decisions:
    recompute = [False] * len(search.graph.ops)
    for op in vertex.recompute:
        recompute[op] = True
    return Decisions(tuple(recompute), (window,) * len(recompute))


def _blend(search: Search, seeds: list[Decisions]) -> None:
    """Try shares between the corners of the Pareto set, then strides between loose and tight seeds."""
    _share(search, _limit(search, 0.4))
    limit = _limit(search, 0.2)
    front = pareto(search)
    loose = [c.decisions for c in corners(front)]
    for stride in _STRIDES:
        for a in loose:
            for b in seeds[-len(search.windows) :]:
                if len(search.seen) < limit:
                    search.simulate(blend_stride(a, b, search.rank, stride), f"one in {stride} kept")


def _limit(search: Search, share: float) -> int:
    """Return how many evaluations there may be when a share of those that are left has been used."""
    return len(search.seen) + int(share * (search.max_evaluations - len(search.seen)))


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


def _share(search: Search, limit: int) -> None:
    """Halve, again and again, the share between two corners where the Pareto set leaves the largest area open."""
    front = corners(pareto(search))
    spans = [_Span(a, b, a, b, 0.0, 1.0) for a, b in zip(front, front[1:], strict=False)]
    order = itertools.count()
    heap = [(-span.area, next(order), span) for span in spans]
    heapq.heapify(heap)
    while heap and len(search.seen) < limit:
        _, _, span = heapq.heappop(heap)
        share = (span.low + span.high) / 2
        if span.high - span.low < 1 / 64:
            continue
        mixed = blend_prefix(span.a.decisions, span.b.decisions, search.rank, share)
        middle = search.simulate(mixed, f"first {share:.0%}")
        for half in (
            _Span(span.a, span.b, span.left, middle, span.low, share),
            _Span(span.a, span.b, middle, span.right, share, span.high),
        ):
            heapq.heappush(heap, (-half.area, next(order), half))


@dataclass(frozen=True, slots=True)
class _Span:
    """The shares between `low` and `high` of the way from `a` to `b`, with the candidates at both ends."""

    a: Candidate
    b: Candidate
    left: Candidate
    right: Candidate
    low: float
    high: float

    @property
    def area(self) -> float:
        """Bytes times seconds that lie between the ends."""
        return (self.left.peak_bytes - self.right.peak_bytes) * (
            self.right.added_seconds - self.left.added_seconds + 1e-9
        )


def _climb(search: Search) -> None:
    """Improve the Pareto set around its widest gaps, by moves of whole classes and then of single ops."""
    singles = tuple((op,) for members in search.classes for op in members)
    for groups, share in ((search.classes, 0.5), (singles, 1.0)):
        limit = _limit(search, share)
        tried: set[tuple[Decisions, bool]] = set()
        while len(search.seen) < limit:
            move = _next_move(search, tried)
            if move is None:
                break
            candidate, lowers = move
            tried.add((candidate.decisions, lowers))
            (_evict if lowers else _keep_back)(search, candidate, groups)


def _next_move(search: Search, tried: set[tuple[Decisions, bool]]) -> tuple[Candidate, bool] | None:
    """Return the end of the widest gap that has not been tried yet, and whether its peak is to be lowered."""
    front = pareto(search)
    floor = Candidate(search.graph.fixed_bytes, front[-1].added_seconds + search.baseline_seconds, front[0].decisions, "")
    gaps = [(_gap(search, a, b), i) for i, (a, b) in enumerate(zip(front, [*front[1:], floor], strict=True))]
    for _, i in sorted(gaps, key=lambda gap: (-gap[0], gap[1])):
        if (front[i].decisions, True) not in tried:
            return front[i], True
        if i + 1 < len(front) and (front[i + 1].decisions, False) not in tried:
            return front[i + 1], False
    return None


def _gap(search: Search, a: Candidate, b: Candidate) -> float:
    """Return how much two neighbours leave open: bytes times the logarithm of time, so that tight budgets do not rule."""
    scale = 10 / max(search.baseline_seconds, 1e-12)
    return (a.peak_bytes - b.peak_bytes) * (
        math.log1p(b.added_seconds * scale) - math.log1p(a.added_seconds * scale) + 1e-9
    )


def _evict(search: Search, candidate: Candidate, groups: Sequence[Sequence[int]]) -> None:
    """Recompute, or drop sooner, one at a time, the groups that are worth most at the peak."""
    bytes_of_op = _bytes_at_peak(search, candidate)
    scored = []
    for members in groups:
        there = float(bytes_of_op[list(members)].sum())
        if there > 0:
            scored.append((there / max(float(search.seconds[list(members)].sum()), 1e-9), members))
    for _, members in sorted(scored, key=lambda item: (-item[0], item[1]))[:_MOVES]:
        for window in _tighter(search, candidate.decisions, members):
            if not search.is_spent:
                moved = with_class(candidate.decisions, members, recompute=True, window=window)
                search.simulate(moved, "recomputed at the peak")


def _bytes_at_peak(search: Search, candidate: Candidate) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return for each op the bytes of what it allocates that are live at the peak."""
    schedule = search.schedule(candidate.decisions)
    peak_step = int(live_bytes(search.tables, schedule).argmax())
    copies = find_copies(search.tables, schedule)
    at_peak = (copies.born_step <= peak_step) & (copies.last_step >= peak_step)
    bytes_of_op = np.zeros(len(search.graph.ops))
    producer = search.tables.producer[copies.storage[at_peak]]
    np.add.at(bytes_of_op, producer[producer >= 0], search.tables.size_bytes[copies.storage[at_peak]][producer >= 0])
    return bytes_of_op


def _tighter(search: Search, decisions: Decisions, members: Sequence[int]) -> tuple[int, ...]:
    """Return the windows to try: the loosest two for what is still stashed somewhere, else the next shorter one."""
    if not all(decisions.recompute[op] for op in members):
        return (search.windows[0], search.windows[-1])
    place = search.windows.index(decisions.reuse_window[members[0]])
    return search.windows[place + 1 : place + 2]


def _keep_back(search: Search, candidate: Candidate, groups: Sequence[Sequence[int]]) -> None:
    """Stash, one at a time, the groups that cost most seconds to recompute."""
    recomputed = [m for m in groups if any(candidate.decisions.recompute[op] for op in m)]
    recomputed.sort(key=lambda m: (-float(search.seconds[list(m)].sum()), m))
    for members in recomputed[:_MOVES]:
        if not search.is_spent:
            moved = with_class(candidate.decisions, members, recompute=False, window=SINGLE_COPY)
            search.simulate(moved, "kept back")
