"""The training graph: one training step as plain data, whoever captured it.

Nothing here knows torch. Ops stand in execution order. A value is one tensor; the storage is the allocation behind it,
and views share one. An op that only makes views allocates nothing and takes part in no schedule: whoever applies a
schedule rebuilds views from the newest copy of their storage.

Ops, values and storages have no slots: a graph is pickled for the process that plans, three times as fast so.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

# Targets of ops that run nothing: a program lets go of a tensor; autograd hands a saved one to the backward.
RELEASE, UNPACK = "release", "unpack"


class Phase(StrEnum):
    """The part of the training step that an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Category(StrEnum):
    """What a storage is for; the footprint is broken down by it."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"
    ACTIVATION = "activation"
    OUTPUT = "output"
    GRADIENT = "gradient"
    TEMPORARY = "temporary"


@dataclass(frozen=True)
class Storage:
    """One allocation.

    Attributes:
        name: Name of the value that allocates it.
        size_bytes: Bytes that the allocator hands out for it.
        category: Its part of the footprint.
        producer: Index of the op that allocates it; None when it exists before the step (or, for a tangent, before
            the backward phase).
        held: Someone outside the step keeps it once it exists: the step can never free it.
    """

    name: str
    size_bytes: int
    category: Category
    producer: int | None
    held: bool


@dataclass(frozen=True)
class Value:
    """One tensor: a name, the storage behind it, and how it looks at it."""

    name: str
    storage: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Op:
    """One operation of the step.

    Attributes:
        name: Unique name.
        target: The operation that runs, such as ``aten.mm.default``.
        phase: Where it runs first.
        reads: Indices of the values that it reads.
        writes: Indices of the values that it makes.
        is_view: All it makes are views of what it reads.
        keep_reason: Why it may not be run twice; empty when it may.
        module: Path of the module that it comes from, such as ``encoder.0``.
        source: Source line of the training code, such as ``model.py:42``.
        signature: Key of its cost: op, shapes, strides, dtypes, other arguments.
        flops: Multiply-adds counted as two, for the ops that have a formula; else 0.
        workspace_bytes: What it is known to allocate inside and free, before it was ever measured; else 0.
        repeats: Indices of earlier ops that this op runs again as one, because some change in place what others make.
            Such an op only ever runs as a copy; the first time each of those runs in its own place, in a forward that
            is fixed.
    """

    name: str
    target: str
    phase: Phase
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    is_view: bool = False
    keep_reason: str = ""
    module: str = ""
    source: str = ""
    signature: str = ""
    flops: int = 0
    workspace_bytes: int = 0
    repeats: tuple[int, ...] = ()

    @property
    def is_mark(self) -> bool:
        """Whether the op runs nothing: it marks when a storage is handed over or let go."""
        return self.target in (RELEASE, UNPACK)


@dataclass(frozen=True)
class TrainingGraph:
    """One training step: ops in execution order over values over storages.

    Attributes:
        base_bytes: Bytes alive throughout that no value of the graph stands for: optimizer state, other modules.
        optimizer_step_bytes: The most that the optimizer's step after the backward has allocated at once and frees.
        forward_is_fixed: Every forward op runs in the forward phase whether or not the plan needs what it makes: the
            program runs, not a graph that could leave ops out.
        clock: For each op when it stands, in the unit of reuse windows; empty to count backward ops.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    base_bytes: int = 0
    name: str = field(default="step")
    optimizer_step_bytes: int = 0
    forward_is_fixed: bool = False
    clock: tuple[int, ...] = ()

    @cached_property
    def kernels(self) -> tuple[int, ...]:
        """Indices of the ops of the untouched step: all but views, and those that only ever run as a copy."""
        return tuple(i for i, op in enumerate(self.ops) if not op.is_view and not op.repeats)

    @cached_property
    def makers(self) -> tuple[int, ...]:
        """For each op the op that runs to make again what it makes: itself, or the one that repeats it."""
        makers = list(range(len(self.ops)))
        for index, op in enumerate(self.ops):
            for repeated in op.repeats:
                makers[repeated] = index
        return tuple(makers)

    @cached_property
    def read_storages(self) -> tuple[tuple[int, ...], ...]:
        """For each op the storages that it reads, each once, in order."""
        return tuple(tuple(dict.fromkeys(self.values[v].storage for v in op.reads)) for op in self.ops)

    @cached_property
    def allocated_storages(self) -> tuple[tuple[int, ...], ...]:
        """For each op the storages that it allocates, in order."""
        allocated: list[list[int]] = [[] for _ in self.ops]
        for index, storage in enumerate(self.storages):
            if storage.producer is not None:
                allocated[storage.producer].append(index)
        for index, op in enumerate(self.ops):
            allocated[index] += [storage for repeated in op.repeats for storage in allocated[repeated]]
        return tuple(tuple(storages) for storages in allocated)

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes alive throughout the step whatever the schedule: base, parameters, buffers, held inputs."""
        held = (s.size_bytes for s in self.storages if s.producer is None and s.held and s.category != Category.TANGENT)
        return self.base_bytes + sum(held)
