"""Search a graph once, for every budget, and describe the plan of what is then chosen."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchecho.cost.model import OpCosts
from torchecho.errors import BudgetError
from torchecho.ir.graph import Category, Phase, TrainingGraph
from torchecho.ir.schedule import Schedule
from torchecho.planner.closure import closure_hull, closure_problem, closure_value
from torchecho.planner.facts import graph_hash, kept_reasons, peak_rows, recomputed_rows, stashed_rows
from torchecho.planner.moves import explore
from torchecho.planner.plan import Plan, Row
from torchecho.planner.search import Candidate, Effort, Search, pareto, start_search
from torchecho.simulate.replay import stash_bytes
from torchecho.units import format_bytes

_LITTLE = 0.8  # a floor above this share of the untouched peak is worth a word


@dataclass(frozen=True)
class Archive:
    """Every plan worth having for one graph, and the bound on all of them.

    Attributes:
        candidates: The untouched step, then every other that none beats: peaks falling, added seconds never falling.
        bound_points: (price, value) pairs of the closure: added seconds >= value - price * stash bytes.
        search_seconds: How long the archive took to make.
    """

    search: Search
    candidates: tuple[Candidate, ...]
    bound_points: tuple[tuple[float, float], ...]
    search_seconds: float

    @property
    def baseline_peak_bytes(self) -> int:
        """Peak of the untouched step."""
        return self.candidates[0].peak_bytes

    @property
    def floor_bytes(self) -> int:
        """Smallest peak that any plan found reaches."""
        return self.candidates[-1].peak_bytes


def make_archive(graph: TrainingGraph, costs: OpCosts, effort: Effort | None = None) -> Archive:
    """Search a graph once, for every budget.

    Args:
        graph: Graph to search.
        costs: Of its ops.
        effort: What may be done; None for a whole search.
    """
    started = time.perf_counter()
    search = start_search(graph, costs, effort)
    problem = closure_problem(graph, search.needs, costs)
    vertices, prices = closure_hull(problem, search.effort.hull_solves)
    explore(search, problem, vertices)
    points = tuple((price, min(closure_value(v, price) for v in vertices)) for price in prices)
    front = [c for c in pareto(search) if c is not search.untouched]
    return Archive(search, (search.untouched, *front), points, time.perf_counter() - started)


def unreachable(archive: Archive, budget_bytes: int) -> BudgetError:
    """Return the refusal of a budget below the floor, which names the floor and what makes it up."""
    where, rows = peak_rows(archive.search.tables, archive.search.schedule(archive.candidates[-1].decisions))
    parts = ", ".join(f"{_label(row)} {format_bytes(row.bytes)}" for row in rows[:5])
    return BudgetError(
        f"budget {format_bytes(budget_bytes)} is below the floor {format_bytes(archive.floor_bytes)}, the smallest peak"
        f" that any plan reaches, at {where}: {parts}."
        f" Raise the budget to {format_bytes(archive.floor_bytes)} or more, or make the batch or the model smaller"
    )


def _label(row: Row) -> str:
    return f"{row.target} at {row.source}" if row.source else row.target


def budget_in_bytes(archive: Archive, budget: float | None) -> int | None:
    """Return a budget in bytes: a float is that fraction of the untouched step's peak."""
    return int(budget * archive.baseline_peak_bytes) if isinstance(budget, float) else budget


def describe(
    archive: Archive, candidate: Candidate, budget_bytes: int | None, max_slowdown: float | None, *, name: str
) -> Plan:
    """Return the plan of one candidate of an archive."""
    search = archive.search
    graph, tables = search.graph, search.tables
    schedule = search.schedule(candidate.decisions)
    untouched = search.schedule(archive.candidates[0].decisions)
    floor = archive.candidates[-1]
    floor_schedule = search.schedule(floor.decisions)
    peak_step, at_peak = peak_rows(tables, schedule)
    stashed = stashed_rows(tables, schedule)
    recomputed = recomputed_rows(graph, schedule, search.costs)
    baseline = max(search.baseline_seconds, 1e-12)
    return Plan(
        graph_hash=graph_hash(graph),
        schedule=schedule,
        budget_bytes=budget_bytes,
        max_slowdown=max_slowdown,
        baseline_peak_bytes=archive.baseline_peak_bytes,
        predicted_peak_bytes=candidate.peak_bytes,
        floor_bytes=archive.floor_bytes,
        overhead=candidate.added_seconds / baseline,
        overhead_bound=overhead_bound(archive, bounded_bytes(candidate, budget_bytes)),
        baseline_seconds=search.baseline_seconds,
        stash_bytes=stash_bytes(tables, schedule),
        baseline_stash_bytes=stash_bytes(tables, untouched),
        num_recomputed=sum(row.count for row in recomputed),
        num_stashed=sum(row.count for row in stashed),
        num_ops=len(graph.kernels),
        planning_seconds=archive.search_seconds,
        peak_step=peak_step,
        frontier=tuple((c.peak_bytes, c.added_seconds / baseline) for c in archive.candidates),
        stashed=stashed,
        recomputed=recomputed,
        at_peak=at_peak,
        floor_parts=peak_rows(tables, floor_schedule)[1],
        kept_reasons=kept_reasons(graph),
        reuse_windows=_reuse_windows(graph, candidate, schedule),
        floor_windows=_reuse_windows(graph, floor, floor_schedule),
        name=name,
        notes=_notes(archive, at_peak, peak_step),
    )


def _reuse_windows(graph: TrainingGraph, candidate: Candidate, schedule: Schedule) -> tuple[tuple[int, int], ...]:
    again = sorted({index for index in schedule.backward if graph.ops[index].phase == Phase.FORWARD})
    return tuple((index, candidate.decisions.reuse_window[index]) for index in again)


def bounded_bytes(candidate: Candidate, budget_bytes: int | None) -> int:
    """Return what a plan is compared with others inside of: its budget, or its peak without one or above it."""
    return max(candidate.peak_bytes, budget_bytes or 0)


def overhead_bound(archive: Archive, peak_bytes: int) -> float:
    """Return the overhead below which no plan in this order keeps the peak, as a fraction of the untouched step."""
    graph = archive.search.graph
    at_boundary = graph.fixed_bytes + sum(
        s.size_bytes for s in graph.storages if s.category in (Category.OUTPUT, Category.TANGENT)
    )
    room = peak_bytes - at_boundary
    seconds = max((value - price * room for price, value in archive.bound_points), default=0.0)
    return max(seconds, 0.0) / max(archive.search.baseline_seconds, 1e-12)


def _notes(archive: Archive, at_peak: Sequence[Row], peak_step: str) -> tuple[str, ...]:
    """Say when recomputation can do little, and what is in its way."""
    if archive.floor_bytes < _LITTLE * archive.baseline_peak_bytes:
        return ()
    parts = ", ".join(f"{_label(row)} {format_bytes(row.bytes)}" for row in at_peak[:3])
    there = f": the peak is at {peak_step}: {parts}" if at_peak else ""
    if len(archive.candidates) == 1:
        return (f"nothing to recompute lowers the peak{there}",)
    return (f"recomputation lowers the peak to {format_bytes(archive.floor_bytes)} at most{there}",)
