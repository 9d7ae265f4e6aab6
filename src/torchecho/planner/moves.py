"""The moves of the search: seeds, blends between them, and a climb around the gaps that are left.

Seeds: the corners of the price-per-byte closure's hull; the outputs of segments of the forward, with everything inside
recomputed; each with one copy a recomputed op and with copies dropped after a reuse window. Blends between neighbouring
corners of the Pareto set: the same share of every class of repeated ops, or the first share of the forward. Room that
the plan on the far side of a wide gap leaves is spent (`torchecho.planner.room`). The climb: recompute what is live at
the peak, drop a copy sooner, or keep back what no peak needs gone, by class and then by op.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.ndimage import minimum_filter1d

from torchecho.planner.closure import ClosureProblem, ClosureSolution, closure_hull
from torchecho.planner.decisions import SINGLE_COPY, Decisions, Needs
from torchecho.planner.repetition import Ranks, blend_prefix, blend_stride, forward_ranks, with_class
from torchecho.planner.room import fill_gap
from torchecho.planner.search import Candidate, Search, corners, pareto
from torchecho.simulate.replay import find_copies, live_bytes

_MOVES = 6
_STRIDES = (2, 3, 4, 6, 8, 12, 16)
_SHORTEST_REACH = 2


def explore(search: Search, problem: ClosureProblem, vertices: Sequence[ClosureSolution]) -> list[Candidate]:
    """Run the whole portfolio and return the Pareto set: peaks falling, added seconds rising.

    Args:
        search: A started search; it keeps everything that is simulated.
        problem: The closure of the graph.
        vertices: Its hull.
    """
    seeds = _closure_seeds(search, vertices)
    _segment_seeds(search, problem)
    _share(search, search.share_of_rest(0.4))
    _stride(search, seeds, search.share_of_rest(0.15))
    _fill(search, search.share_of_rest(0.3))
    _climb(search)
    return pareto(search)


def _closure_seeds(search: Search, vertices: Sequence[ClosureSolution]) -> list[Decisions]:
    """Simulate every vertex with one copy an op, and the corners among them with each reuse window."""
    limit = search.share_of_rest(0.3)
    seeds = [_decisions(search, vertex.recompute, SINGLE_COPY) for vertex in vertices]
    for seed in seeds:
        if search.spent < limit:
            search.simulate(seed, "closure")
    tightest = [Decisions(seeds[-1].recompute, (window,) * len(search.graph.ops)) for window in search.windows]
    likely = [corner.decisions for corner in corners(pareto(search))]
    for seed in dict.fromkeys([*likely, *seeds]):
        for window in search.windows[1:]:
            if search.spent < limit:
                search.simulate(Decisions(seed.recompute, (window,) * len(seed.recompute)), f"closure, window {window}")
    return tightest


def _decisions(search: Search, ops: Sequence[int], window: int) -> Decisions:
    recompute = [False] * len(search.graph.ops)
    for op in ops:
        recompute[op] = True
    return Decisions(tuple(recompute), (window,) * len(recompute))


def _segment_seeds(search: Search, problem: ClosureProblem) -> None:
    """Stash what crosses the cuts between segments of the forward, and solve the closure of what lies inside them.

    Without cuts the closure is content to recompute a long chain at once, a time loop for instance, and the copies of
    all its steps are then alive together. A read long after (of a skip, of the states that attention reads) does not
    tie one segment to the next.
    """
    limit = search.share_of_rest(0.35)
    num, reach = len(search.needs.forward), _SHORTEST_REACH
    while 2 * reach < num and search.spent < limit:
        for last in dict.fromkeys(_ties(search.needs, within=4 * reach)):
            cuts = _cuts(_crossing_bytes(search, last), reach)
            inside = _inside_segments(search.needs, last, cuts)
            for vertex in closure_hull(problem.within(inside), search.effort.segment_solves)[0]:
                if search.spent < limit:
                    search.simulate(_decisions(search, vertex.recompute, SINGLE_COPY), f"segments of {reach}")
        reach *= 2


def _ties(needs: Needs, within: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return for each forward kernel the last place among them that it ties itself to, in two ways.

    The first leaves out every op that is read further on than `within`, the second only those of its reads.
    """
    place = {op: i for i, op in enumerate(needs.forward)}
    reads = [[place[reader] for reader in needs.forward_readers[op]] for op in needs.forward]
    last = (max(places, default=i) for i, places in enumerate(reads))
    short = tuple(read if read - i <= within else i for i, read in enumerate(last))
    near = tuple(max((r for r in places if r - i <= within), default=i) for i, places in enumerate(reads))
    return short, near


def _crossing_bytes(search: Search, last: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the bytes that the forward carries from each forward kernel to the next, until their last reads."""
    graph, forward = search.graph, search.needs.forward
    size = np.array([sum(graph.storages[s].size_bytes for s in graph.allocated_storages[op]) for op in forward], float)
    delta = size.copy()
    np.subtract.at(delta, np.array(last), size)
    return np.asarray(np.cumsum(delta))


def _cuts(crossing: npt.NDArray[np.float64], reach: int) -> list[int]:
    """Return the places where the forward carries least, among all within `reach` ops."""
    cuts: list[int] = []
    for place in np.flatnonzero(crossing == minimum_filter1d(crossing, 2 * reach + 1)).tolist():
        if not cuts or place - cuts[-1] > reach:
            cuts.append(place)
    return cuts


def _inside_segments(needs: Needs, last: Sequence[int], cuts: Sequence[int]) -> tuple[bool, ...]:
    """Return which ops may be recomputed when those whose results cross a cut may not."""
    ends = [*cuts, len(last)]
    inside = list(needs.repeatable)
    for place, op in enumerate(needs.forward):
        inside[op] = inside[op] and last[place] <= ends[bisect.bisect_left(ends, place)]
    return tuple(inside)


def _stride(search: Search, seeds: Sequence[Decisions], limit: int) -> None:
    """Keep every second, third, ... of the repeated ops of tight seeds as loose ones have them."""
    loose = [corner.decisions for corner in corners(pareto(search))]
    for stride in _STRIDES:
        for a in loose:
            for b in seeds:
                if search.spent < limit:
                    search.simulate(blend_stride(a, b, search.rank, stride), f"one in {stride} kept")


@dataclass(frozen=True, slots=True)
class _Span:
    """The shares between `low` and `high` of the way from `a` to `b`, with the candidates at both ends."""

    a: Candidate
    b: Candidate
    left: Candidate
    right: Candidate
    low: float
    high: float
    rank: Ranks


def _share(search: Search, limit: int) -> None:
    """Halve, again and again, the share between two corners where the Pareto set leaves the widest gap."""
    front = corners(pareto(search))
    kinds = (search.rank, forward_ranks(search.needs))
    spans = [_Span(a, b, a, b, 0.0, 1.0, rank) for a, b in itertools.pairwise(front) for rank in kinds]
    order = itertools.count()
    heap = [(-_gap(search, span.left, span.right), next(order), span) for span in spans]
    heapq.heapify(heap)
    while heap and search.spent < limit:
        _, _, span = heapq.heappop(heap)
        share = (span.low + span.high) / 2
        if span.high - span.low < 1 / 128:
            continue
        mixed = blend_prefix(span.a.decisions, span.b.decisions, span.rank, share)
        middle = search.simulate(mixed, f"first {share:.0%}")
        for half in (
            _Span(span.a, span.b, span.left, middle, span.low, share, span.rank),
            _Span(span.a, span.b, middle, span.right, share, span.high, span.rank),
        ):
            heapq.heappush(heap, (-_gap(search, half.left, half.right), next(order), half))


def _fill(search: Search, limit: int) -> None:
    """Spend the room of the plans on the far sides of the widest gaps."""
    tried: set[int] = set()
    while search.spent < limit:
        pairs = [pair for pair in itertools.pairwise(pareto(search)) if pair[1].number not in tried]
        if not pairs:
            return
        larger, smaller = max(pairs, key=lambda pair: _gap(search, *pair))
        tried.add(smaller.number)
        fill_gap(search, larger, smaller)


def _climb(search: Search) -> None:
    """Improve the Pareto set around its widest gaps, by moves of whole classes and then of single ops."""
    singles = tuple((op,) for members in search.classes for op in members)
    for groups, share in ((search.classes, 0.5), (singles, 1.0)):
        limit = search.share_of_rest(share)
        tried: set[tuple[int, bool]] = set()
        while search.spent < limit:
            move = _next_move(search, tried)
            if move is None:
                break
            candidate, lowers = move
            tried.add((candidate.number, lowers))
            (_evict if lowers else _keep_back)(search, candidate, groups)


def _next_move(search: Search, tried: set[tuple[int, bool]]) -> tuple[Candidate, bool] | None:
    """Return the end of the widest gap that has not been tried yet, and whether its peak is to be lowered."""
    front = pareto(search)
    most_seconds = front[-1].added_seconds + search.baseline_seconds
    floor = Candidate(search.graph.fixed_bytes, most_seconds, front[0].decisions, "unreached", -1)
    gaps = [(_gap(search, a, b), i) for i, (a, b) in enumerate(zip(front, [*front[1:], floor], strict=True))]
    for _, i in sorted(gaps, key=lambda gap: (-gap[0], gap[1])):
        if (front[i].number, True) not in tried:
            return front[i], True
        if i + 1 < len(front) and (front[i + 1].number, False) not in tried:
            return front[i + 1], False
    return None


def _gap(search: Search, a: Candidate, b: Candidate) -> float:
    """Return what two neighbours leave open: bytes times the logarithm of time, so that tight budgets do not rule."""
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
            scored.append((there / max(float(search.copy_seconds[list(members)].sum()), 1e-9), members))
    for _, members in sorted(scored, key=lambda item: (-item[0], item[1]))[:_MOVES]:
        for window in _tighter(search, candidate.decisions, members):
            if not search.is_spent:
                moved = with_class(candidate.decisions, members, recompute=True, window=window)
                search.simulate(moved, "recomputed at the peak")


def _bytes_at_peak(search: Search, candidate: Candidate) -> npt.NDArray[np.float64]:
    """Return for each op the bytes of what it allocates that are live at the peak."""
    schedule = search.schedule(candidate.decisions)
    copies = find_copies(search.tables, schedule)
    peak_step = int(live_bytes(search.tables, schedule, copies).argmax())
    at_peak = (copies.born_step <= peak_step) & (copies.last_step >= peak_step)
    bytes_of_op = np.zeros(len(search.graph.ops))
    producer = search.tables.producer[copies.storage[at_peak]]
    makers = np.array(search.graph.makers)[producer[producer >= 0]]
    np.add.at(bytes_of_op, makers, search.tables.size_bytes[copies.storage[at_peak]][producer >= 0])
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
    recomputed.sort(key=lambda m: (-float(search.copy_seconds[list(m)].sum()), m))
    for members in recomputed[:_MOVES]:
        if not search.is_spent:
            moved = with_class(candidate.decisions, members, recompute=False, window=SINGLE_COPY)
            search.simulate(moved, "kept back")
