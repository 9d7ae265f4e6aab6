"""A ladder of schedules for one graph, loosest first, and which rung to stand on when the real peak is known only by trying.

Inductor fuses and reorders, so that the peak of a schedule under it is less than the simulated one by an amount that only
a rehearsal shows. Rungs are rehearsed one at a time, by bisection, until the loosest that fits is found.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from torchecho.errors import BudgetError
from torchecho.ir.schedule import Schedule
from torchecho.planner.facts import peak_rows, recomputed_rows, stashed_rows
from torchecho.planner.plan import Plan
from torchecho.planner.planner import Archive, describe
from torchecho.simulate.replay import peak_bytes, stash_bytes
from torchecho.units import format_bytes, format_overhead

_STEP = 0.93


class Unrehearsed(Exception):
    """A decision needs the peak of a schedule that was never rehearsed."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A schedule, its simulated peak, and the seconds that it adds to the first rung's."""

    schedule: Schedule
    simulated_bytes: int
    added_seconds: float

    @property
    def digest(self) -> str:
        """Identity of the schedule."""
        return hashlib.sha256(repr((self.schedule.steps, self.schedule.num_forward)).encode()).hexdigest()[:16]


@dataclass
class Ladder:
    """Rungs and the peaks that rehearsals found, by digest; peaks include the fixed bytes."""

    archive: Archive
    rungs: tuple[Rung, ...]
    peaks: dict[str, int] = field(default_factory=dict)

    def peak_of(self, index: int) -> int:
        """Return the rehearsed peak of a rung.

        Raises:
            Unrehearsed: there is none yet.
        """
        digest = self.rungs[index].digest
        if digest not in self.peaks:
            raise Unrehearsed(digest)
        return self.peaks[digest]

    @property
    def seconds(self) -> float:
        """Seconds of the step of the first rung."""
        return max(self.archive.search.baseline_seconds, 1e-12)


def make_ladder(archive: Archive, first: Schedule | None) -> Ladder:
    """Return the ladder of an archive: a rung for about every 7 % less simulated peak.

    Args:
        archive: All plans of a graph.
        first: Schedule of the untouched step under Inductor; None: the one that stashes everything.
    """
    search = archive.search
    rungs = []
    start_seconds = 0.0
    if first is not None:
        start_seconds = float(search.seconds[list(first.steps)].sum()) - search.baseline_seconds
        rungs.append(Rung(first, peak_bytes(search.tables, first), 0.0))
    for candidate in archive.candidates:
        is_tightest = candidate is archive.candidates[-1]
        if not rungs or candidate.peak_bytes < _STEP * rungs[-1].simulated_bytes or is_tightest:
            added = max(candidate.added_seconds - start_seconds, 0.0)
            rungs.append(Rung(search.schedule(candidate.decisions), candidate.peak_bytes, added))
    return Ladder(archive, tuple(rungs))


def choose_rung(
    peak_of: Callable[[int], int],
    rungs: tuple[Rung, ...],
    budget_bytes: int | None,
    max_slowdown: float | None,
    seconds: float,
) -> int:
    """Return the loosest rung that fits the budget, or without one the smallest peak inside the slowdown.

    Raises:
        BudgetError: no rung that was tried keeps to both.
        Unrehearsed: from `peak_of`.
    """
    if budget_bytes is None:
        assert max_slowdown is not None, "options always give a budget or a slowdown"
        inside = [i for i, rung in enumerate(rungs) if rung.added_seconds <= max_slowdown * seconds + 1e-12]
        return min((0, inside[-1]), key=peak_of)
    index = _loosest_fit(peak_of, len(rungs), budget_bytes)
    overhead = rungs[index].added_seconds / seconds
    if max_slowdown is not None and overhead > max_slowdown:
        raise BudgetError(
            f"budget {format_bytes(budget_bytes)} needs {format_overhead(overhead)} step time, more than max_slowdown="
            f"{max_slowdown:g} allows: raise the budget or the slowdown"
        )
    return index


def _loosest_fit(peak_of: Callable[[int], int], num_rungs: int, budget_bytes: int) -> int:
    if peak_of(0) <= budget_bytes:
        return 0
    low, high = 0, num_rungs - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if peak_of(middle) <= budget_bytes else (middle, high)
    if peak_of(high) > budget_bytes:
        floor_bytes = min(peak_of(low), peak_of(high))
        raise BudgetError(
            f"budget {format_bytes(budget_bytes)} is below the floor {format_bytes(floor_bytes)}, the smallest peak that"
            f" any plan reaches under Inductor. Raise the budget to {format_bytes(floor_bytes)} or more, make the batch or"
            " the model smaller, or try lowering='eager', which keeps the exact order of the plan"
        )
    return high


def describe_rung(ladder: Ladder, index: int, budget_bytes: int | None, max_slowdown: float | None, *, name: str) -> Plan:
    """Return the plan of a rung, with the peaks that rehearsals found."""
    archive, rung = ladder.archive, ladder.rungs[index]
    tables, schedule = archive.search.tables, rung.schedule
    known = {r.digest: r.added_seconds / ladder.seconds for r in ladder.rungs if r.digest in ladder.peaks}
    stashed = stashed_rows(tables, schedule)
    recomputed = recomputed_rows(archive.search.graph, schedule, archive.search.costs)
    peak_step, at_peak = peak_rows(tables, schedule)
    return dataclasses.replace(
        describe(archive, archive.candidates[0], budget_bytes, max_slowdown, name=name),
        schedule=schedule,
        baseline_peak_bytes=ladder.peak_of(0),
        predicted_peak_bytes=ladder.peak_of(index),
        floor_bytes=min(ladder.peaks[digest] for digest in known),
        overhead=rung.added_seconds / ladder.seconds,
        overhead_bound=0.0,
        stash_bytes=stash_bytes(tables, schedule),
        baseline_stash_bytes=stash_bytes(tables, ladder.rungs[0].schedule),
        num_recomputed=sum(row.count for row in recomputed),
        num_stashed=sum(row.count for row in stashed),
        peak_step=peak_step,
        frontier=_frontier([(ladder.peaks[digest], overhead) for digest, overhead in known.items()]),
        stashed=stashed,
        recomputed=recomputed,
        at_peak=at_peak,
        lowering="inductor",
        notes=("rows at the peak are of the plan's order: Inductor fuses some of them away",),
    )


def _frontier(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    kept: list[tuple[int, float]] = []
    for peak, overhead in sorted(points, key=lambda point: (point[1], point[0])):
        if not kept or peak < kept[-1][0]:
            kept.append((peak, overhead))
    return tuple(kept)
