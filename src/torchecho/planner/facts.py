"""Gather what a person wants to know about a schedule: rows by place in the program."""

import hashlib
import marshal
from collections import Counter
from collections.abc import Iterable

from torchecho.cost.model import OpCosts
from torchecho.ir.graph import Category, Op, TrainingGraph
from torchecho.ir.schedule import Schedule
from torchecho.planner.plan import Row
from torchecho.simulate.replay import OPTIMIZER_STEP, ReplayTables, find_copies, live_bytes


def graph_hash(graph: TrainingGraph) -> str:
    """Return the identity of a graph: a digest of its ops, storages and lifetimes."""
    ops = [(o.name, o.target, o.phase.value, o.reads, o.writes, o.keep_reason, o.repeats) for o in graph.ops]
    storages = [(s.size_bytes, s.category.value, s.producer, s.held) for s in graph.storages]
    facts = marshal.dumps((ops, storages), 2)  # later versions write what is one object, and not only equal, otherwise
    return hashlib.sha256(facts).hexdigest()[:16]


def stashed_rows(tables: ReplayTables, schedule: Schedule) -> tuple[Row, ...]:
    """Return what is alive across the boundary between forward and backward and not held by the caller."""
    copies = find_copies(tables, schedule)
    boundary = schedule.num_forward
    across = (copies.born_step < boundary) & (copies.last_step >= boundary) & ~tables.held[copies.storage]
    return _storage_rows(tables.graph, copies.storage[across].tolist())


def recomputed_rows(graph: TrainingGraph, schedule: Schedule, costs: OpCosts) -> tuple[Row, ...]:
    """Return the ops that run again in the backward phase, with what that adds."""
    rows: dict[tuple[str, str, str], list[float]] = {}
    for index in schedule.backward:
        op = graph.ops[index]
        if op.phase == "forward":
            made = sum(graph.storages[s].size_bytes for s in graph.allocated_storages[index])
            _add(rows, (op.target, op.module, op.source), made, costs.copy_seconds(graph, index))
    return _sorted_rows(rows, by_seconds=True)


def peak_rows(tables: ReplayTables, schedule: Schedule) -> tuple[str, tuple[Row, ...]]:
    """Return the op that runs at the peak, and everything that is live then."""
    copies = find_copies(tables, schedule)
    live = live_bytes(tables, schedule, copies)
    if not len(live):
        return "", ()
    step = int(live.argmax())
    there = (copies.born_step <= step) & (copies.last_step >= step)
    graph = tables.graph
    op = graph.ops[schedule.steps[step]] if step < len(schedule.steps) else None
    sources = [
        i for i, s in enumerate(graph.storages) if s.producer is None and s.held and s.category != Category.TANGENT
    ]
    rows = list(_storage_rows(graph, [*copies.storage[there].tolist(), *sources]))
    workspace = graph.optimizer_step_bytes if op is None else int(tables.workspace_bytes[schedule.steps[step]])
    module = "" if op is None else op.module
    others = (Row("workspace", module, "", 1, workspace, 0.0), Row("base", "", "", 1, graph.base_bytes, 0.0))
    rows += [row for row in others if row.bytes]
    where = OPTIMIZER_STEP if op is None else _place(op)
    return where, tuple(sorted(rows, key=lambda row: -row.bytes))


def _place(op: Op) -> str:
    return f"{op.target} ({op.phase.value}{', ' + op.source if op.source else ''})"


def _storage_rows(graph: TrainingGraph, storages: Iterable[int]) -> tuple[Row, ...]:
    rows: dict[tuple[str, str, str], list[float]] = {}
    for index in storages:
        storage = graph.storages[index]
        if storage.producer is None:
            key = (storage.category.value, "", "")
        else:
            op = graph.ops[storage.producer]
            suffix = " (gradient)" if storage.category == Category.GRADIENT else ""
            key = (op.target + suffix, op.module, op.source)
        _add(rows, key, storage.size_bytes, 0.0)
    return _sorted_rows(rows, by_seconds=False)


def _add(rows: dict[tuple[str, str, str], list[float]], key: tuple[str, str, str], size: int, seconds: float) -> None:
    row = rows.setdefault(key, [0, 0, 0.0])
    row[0] += 1
    row[1] += size
    row[2] += seconds


def _sorted_rows(rows: dict[tuple[str, str, str], list[float]], *, by_seconds: bool) -> tuple[Row, ...]:
    made = [Row(*key, count=int(n), bytes=int(size), seconds=seconds) for key, (n, size, seconds) in rows.items()]
    return tuple(sorted(made, key=lambda row: (-row.seconds if by_seconds else -row.bytes, row.source, row.target)))


def kept_reasons(graph: TrainingGraph) -> tuple[tuple[str, int], ...]:
    """Return why forward ops may not be repeated, with how many of each, most first."""
    reasons = Counter(op.keep_reason for op in graph.ops if op.keep_reason and op.phase == "forward")
    return tuple(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))
