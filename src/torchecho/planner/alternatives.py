"""Choose among the archives of graphs that compute the same with other costs and other bytes.

The first graph is the untouched step, against which all are counted. The graphs differ by a choice outside the
decisions of single ops, such as what the recurrent layers stash.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from torchecho.errors import BudgetError
from torchecho.planner.plan import Plan
from torchecho.planner.planner import Archive, bounded_bytes, describe, overhead_bound, unreachable
from torchecho.planner.search import Candidate
from torchecho.units import format_bytes, format_overhead

_Choice = tuple[int, Candidate]


def make_plan_among(
    archives: Sequence[Archive], budget_bytes: int | None, max_slowdown: float | None, *, name: str = "step"
) -> tuple[int, Plan]:
    """Choose from several archives and describe the choice.

    Args:
        archives: One or more; the untouched step of the first is what the others are counted against.
        budget_bytes: Bytes; None for no budget.
        max_slowdown: Most added seconds, as a fraction of the untouched step's; None for no limit.
        name: What the plan is called in reports.

    Returns:
        Which archive the plan is of, and the plan.

    Raises:
        BudgetError: nothing in any of the archives keeps to both.
    """
    place, candidate = choose(archives, budget_bytes, max_slowdown)
    plan = describe(archives[place], candidate, budget_bytes, max_slowdown, name=name)
    first = archives[0].search
    if len(archives) == 1:
        return place, plan
    lowest = describe(_lowest(archives), _lowest(archives).candidates[-1], None, None, name=name)
    untouched = describe(archives[0], archives[0].candidates[0], None, None, name=name)
    overhead = _added_seconds(archives, place, candidate) / max(first.baseline_seconds, 1e-12)
    frontier = tuple(_frontier(archives))
    return place, dataclasses.replace(
        plan,
        baseline_peak_bytes=untouched.baseline_peak_bytes,
        baseline_seconds=first.baseline_seconds,
        baseline_stash_bytes=untouched.baseline_stash_bytes,
        floor_bytes=lowest.floor_bytes,
        floor_parts=lowest.floor_parts,
        overhead=overhead,
        overhead_bound=min(overhead, _bound(archives, bounded_bytes(candidate, budget_bytes))),
        planning_seconds=sum(archive.search_seconds for archive in archives),
        frontier=frontier,
        notes=plan.notes if len(frontier) == 1 else (),
    )


def choose(archives: Sequence[Archive], budget_bytes: int | None, max_slowdown: float | None) -> _Choice:
    """Return the fastest candidate inside the budget, or the smallest peak inside the slowdown, and whose it is.

    Raises:
        BudgetError: no candidate keeps to both.
    """

    def seconds(choice: _Choice) -> float:
        return _added_seconds(archives, *choice)

    everything = [(place, c) for place, archive in enumerate(archives) for c in archive.candidates]
    if budget_bytes is None:
        assert max_slowdown is not None, "options always give a budget or a slowdown"
        most = max_slowdown * archives[0].search.baseline_seconds + 1e-12
        return min((c for c in everything if seconds(c) <= most), key=lambda c: (c[1].peak_bytes, seconds(c)))
    fitting = [choice for choice in everything if choice[1].peak_bytes <= budget_bytes]
    if not fitting:
        raise unreachable(_lowest(archives), budget_bytes)
    fastest = min(fitting, key=seconds)
    _check_slowdown(seconds(fastest), archives[0].search.baseline_seconds, budget_bytes, max_slowdown)
    return fastest


def _check_slowdown(
    added_seconds: float, baseline_seconds: float, budget_bytes: int, max_slowdown: float | None
) -> None:
    """Raise a BudgetError if what the budget costs is more than the slowdown allows."""
    if max_slowdown is None or added_seconds <= max_slowdown * baseline_seconds:
        return
    raise BudgetError(
        f"budget {format_bytes(budget_bytes)} needs {format_overhead(added_seconds / baseline_seconds)} step time, more"
        f" than max_slowdown={max_slowdown:g} allows: raise the budget or the slowdown"
    )


def _added_seconds(archives: Sequence[Archive], place: int, candidate: Candidate) -> float:
    """Return what a candidate adds to the untouched step of the first archive."""
    return archives[place].search.baseline_seconds - archives[0].search.baseline_seconds + candidate.added_seconds


def _lowest(archives: Sequence[Archive]) -> Archive:
    return min(archives, key=lambda archive: archive.floor_bytes)


def floor_bytes(archives: Sequence[Archive]) -> int:
    """Return the smallest peak that any plan of any archive reaches."""
    return _lowest(archives).floor_bytes


def _bound(archives: Sequence[Archive], peak_bytes: int) -> float:
    """Return the overhead below which no plan of any archive keeps the peak."""
    base = max(archives[0].search.baseline_seconds, 1e-12)
    own = ((1 + overhead_bound(a, peak_bytes)) * a.search.baseline_seconds / base - 1 for a in archives)
    return max(min(own), 0.0)


def _frontier(archives: Sequence[Archive]) -> Iterator[tuple[int, float]]:
    """Yield the untouched step, then (peak, overhead) of every candidate that no other of any archive beats."""
    base = max(archives[0].search.baseline_seconds, 1e-12)
    every = sorted(
        (_added_seconds(archives, place, c) / base, c.peak_bytes)
        for place, archive in enumerate(archives)
        for c in archive.candidates
    )
    lowest = archives[0].baseline_peak_bytes
    yield lowest, 0.0
    for overhead, peak in every:
        if peak < lowest:
            lowest = peak
            yield peak, overhead
