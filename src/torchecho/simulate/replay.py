"""Replay a schedule over a training graph: which bytes are live at each step.

A copy of a storage lives from the step that allocates it to the last step that reads it; storages that someone outside
holds live on. An op reads the newest copy of each storage. Every step is sampled after the op has allocated its outputs
and its workspace and before anything that it was the last to read is freed, the order in which a boxed step runs.

Not modelled: the fragmentation of caching allocators, and what the caller allocates between forward and backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchecho.errors import ScheduleError
from torchecho.ir.graph import Category, TrainingGraph
from torchecho.ir.schedule import Schedule
from torchecho.simulate.timeline import Timeline

Ints = npt.NDArray[np.int64]

OPTIMIZER_STEP = "the optimizer's step"


@dataclass(frozen=True, slots=True)
class ReplayTables:
    """What replay needs of a graph, as arrays made once; `starts[i]:starts[i + 1]` is the row of op i.

    Read are only storages that a step makes or may free.
    """

    graph: TrainingGraph
    read_starts: Ints
    read_storages: Ints
    alloc_starts: Ints
    alloc_storages: Ints
    size_bytes: Ints
    workspace_bytes: Ints
    producer: Ints
    held: npt.NDArray[np.bool_]
    is_tangent: npt.NDArray[np.bool_]
    loose_sources: Ints


@dataclass(frozen=True, slots=True)
class Copies:
    """Every copy of a storage in one schedule: step that allocates it and step of its last read."""

    storage: Ints
    born_step: Ints
    last_step: Ints


def replay_tables(graph: TrainingGraph, workspace_bytes: Sequence[int]) -> ReplayTables:
    """Make the arrays that `replay` and `peak_bytes` share; `workspace_bytes` has one entry per op."""
    alloc_starts, alloc_storages = _rows(graph.allocated_storages)
    producer = np.array([-1 if s.producer is None else s.producer for s in graph.storages], dtype=np.int64)
    held = np.array([s.held for s in graph.storages], dtype=bool)
    tangent = np.array([s.category == Category.TANGENT for s in graph.storages], dtype=bool)
    is_loose = (producer < 0) & (~held | tangent)
    is_counted = ((producer >= 0) | is_loose).tolist()
    read_starts, read_storages = _rows([[s for s in row if is_counted[s]] for row in graph.read_storages])
    return ReplayTables(
        graph=graph,
        read_starts=read_starts,
        read_storages=read_storages,
        alloc_starts=alloc_starts,
        alloc_storages=alloc_storages,
        size_bytes=np.array([s.size_bytes for s in graph.storages], dtype=np.int64),
        workspace_bytes=np.array(workspace_bytes, dtype=np.int64),
        producer=producer,
        held=held,
        is_tangent=tangent,
        loose_sources=np.flatnonzero(is_loose),
    )


def _rows(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=starts[1:])
    return starts, np.array([item for row in rows for item in row], dtype=np.int64)


def _expand(starts: Ints, items: Ints, ops: Ints) -> tuple[Ints, Ints]:
    """Return (step, item) pairs of the rows of `ops`, in step order."""
    first = starts[ops]
    counts = starts[ops + 1] - first
    step = np.repeat(np.arange(len(ops), dtype=np.int64), counts)
    before = np.cumsum(counts) - counts
    return step, items[np.arange(len(step), dtype=np.int64) + np.repeat(first - before, counts)]


def find_copies(tables: ReplayTables, schedule: Schedule) -> Copies:
    """Return every copy of every storage with its live range, in order of storage then step.

    Raises:
        ScheduleError: a step reads a storage before anything has allocated it.
    """
    ops = schedule.ops
    span = len(ops) + 1
    born_step, storage = _expand(tables.alloc_starts, tables.alloc_storages, ops)
    sources = tables.loose_sources
    tangent_step = schedule.num_forward * tables.is_tangent[sources]
    storage = np.concatenate([storage, sources])
    born_step = np.concatenate([born_step, tangent_step])
    keys = storage * span + born_step
    order = np.argsort(keys, kind="stable")
    storage, born_step = storage[order], born_step[order]
    last_step = born_step.copy()
    read_step, read = _expand(tables.read_starts, tables.read_storages, ops)
    found = _newest(keys[order], storage, read, read * span + read_step)
    _check_reads(tables, schedule, (storage, born_step), found, read, read_step)
    last_step[found] = read_step
    held_first = tables.held[storage] & np.concatenate([[True], storage[1:] != storage[:-1]])
    last_step[held_first] = span - 1
    return Copies(storage, born_step, last_step)


def _newest(keys: Ints, storage: Ints, read: Ints, read_keys: Ints) -> Ints:
    """Return which copy each read finds: the newest one of its storage, or any where there is none.

    Keys are storage and step in one number, those of the copies rising.
    """
    counts = np.bincount(storage, minlength=int(read.max(initial=0)) + 1)
    first = np.cumsum(counts) - counts
    found: Ints = np.minimum(first[read], max(len(storage) - 1, 0))
    many = np.flatnonzero(counts[read] > 1)  # few: most storages have one copy, which needs no search
    found[many] = np.searchsorted(keys, read_keys[many], side="right") - 1
    return found


def _check_reads(
    tables: ReplayTables, schedule: Schedule, born: tuple[Ints, Ints], found: Ints, read: Ints, read_step: Ints
) -> None:
    storage, born_step = born
    is_wrong = (storage[found] != read) | (born_step[found] > read_step) if len(storage) else read >= 0
    wrong = np.flatnonzero(is_wrong)
    if not len(wrong):
        return
    step, missing = int(read_step[wrong[0]]), int(read[wrong[0]])
    op = tables.graph.ops[schedule.steps[step]]
    raise ScheduleError(
        f"step {step} ({op.name}, {op.source or 'no source line'}) reads {tables.graph.storages[missing].name},"
        " which no earlier step allocates: schedule its producer first"
    )


def live_bytes(tables: ReplayTables, schedule: Schedule, copies: Copies | None = None) -> Ints:
    """Return the live bytes at each step, everything included; one more for the optimizer's step where it is known.

    Args:
        tables: Of the graph.
        schedule: What runs.
        copies: Of the schedule, for who has found them already.
    """
    copies = copies or find_copies(tables, schedule)
    live = _live(copies, tables.size_bytes[copies.storage], len(schedule.steps)) + tables.graph.fixed_bytes
    return np.asarray((live + _workspace(tables, schedule))[: num_samples(tables, schedule)])


def num_samples(tables: ReplayTables, schedule: Schedule) -> int:
    """Return how many samples a timeline has: one a step, and one for the optimizer's step where it is known."""
    return len(schedule.steps) + bool(tables.graph.optimizer_step_bytes)


def _live(copies: Copies, size_bytes: Ints, num_steps: int) -> Ints:
    """Return the live bytes of copies at each step, and after the last."""
    delta = np.zeros(num_steps + 2, dtype=np.int64)
    np.add.at(delta, copies.born_step, size_bytes)
    np.subtract.at(delta, copies.last_step + 1, size_bytes)
    return np.cumsum(delta)[: num_steps + 1]


def _workspace(tables: ReplayTables, schedule: Schedule) -> Ints:
    return np.append(tables.workspace_bytes[schedule.ops], tables.graph.optimizer_step_bytes)


def peak_bytes(tables: ReplayTables, schedule: Schedule) -> int:
    """Return the largest number of bytes live at any step."""
    return int(live_bytes(tables, schedule).max(initial=tables.graph.fixed_bytes))


def stash_bytes(tables: ReplayTables, schedule: Schedule) -> int:
    """Return the bytes of the storages alive across the boundary between forward and backward, held ones left out."""
    copies = find_copies(tables, schedule)
    boundary = schedule.num_forward
    across = (copies.born_step < boundary) & (copies.last_step >= boundary) & ~tables.held[copies.storage]
    return int(tables.size_bytes[copies.storage[across]].sum())


def replay(tables: ReplayTables, schedule: Schedule) -> Timeline:
    """Replay a schedule and return its timeline, broken down by category.

    Raises:
        ScheduleError: a step reads a storage that is not live.
    """
    copies = find_copies(tables, schedule)
    samples = num_samples(tables, schedule)
    by_category: dict[str, tuple[int, ...]] = {}
    for category in Category:
        belongs = np.array([s.category == category for s in tables.graph.storages], dtype=bool)
        size = tables.size_bytes[copies.storage] * belongs[copies.storage]
        live = _live(copies, size, len(schedule.steps))
        fixed = sum(
            s.size_bytes
            for s in tables.graph.storages
            if s.category == category and s.producer is None and s.held and category != Category.TANGENT
        )
        by_category[category.value] = tuple((live[:samples] + fixed).tolist())
    by_category["workspace"] = tuple(_workspace(tables, schedule)[:samples].tolist())
    by_category["base"] = (tables.graph.base_bytes,) * samples
    return Timeline(
        live_bytes=tuple(live_bytes(tables, schedule, copies).tolist()),
        base_bytes=tables.graph.fixed_bytes,
        labels=(*(tables.graph.ops[i].name for i in schedule.steps), OPTIMIZER_STEP)[:samples],
        by_category=by_category,
    )
