"""What is written down of a step while it runs, and the plain data that it is read as afterwards.

Thousands of calls are written down in one step and stay until it is planned, while the program trains on. So a call is
written as atoms in columns and as tuples of them: nothing that the garbage collector has to walk over again and again,
and nothing that can be worked out later. Each way in which a tensor looks at a storage is kept once.
"""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from torchecho.capture.describe import Look, looks
from torchecho.capture.place import Place
from torchecho.capture.schema import changes_secretly, hidden_statistics
from torchecho.capture.storage import storage_key

NO_STORAGE = -1
LAYOUT_BITS = 32  # of a sight; above them stands the number of the storage
_LAYOUT = (1 << LAYOUT_BITS) - 1


class Call(NamedTuple):
    """One call: of what, on what, what it made.

    Attributes:
        given: Positional arguments as they were written down, with `...` for every tensor.
        named: Keyword arguments, likewise.
        returned: What it returns, likewise.
        sights: Of these tensors, in order.
        layouts: How the layouts look at storage 0, or at none.
        reads: Numbers of the storages that it reads, each once.
        allocates: Numbers of the storages that it allocates.
        writes: Numbers of the storages that it changes in place.
        runs: It does more than look at storages that it was given.
        place: Where in the program it stands; None in the backward.
        module: Path of the module whose forward was running.
        kind: Equal for calls of the same function that differ at most in where they stand and where their tensors lie.
    """

    func: Any
    given: tuple[Any, ...]
    named: Mapping[str, Any]
    returned: Any
    sights: tuple[int, ...]
    layouts: Sequence[Look]
    reads: tuple[int, ...]
    allocates: tuple[int, ...]
    writes: tuple[int, ...]
    runs: bool
    in_backward: bool
    place: Place | None
    module: str
    kind: int

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments with a `Look` for every tensor."""
        args: tuple[Any, ...] = _filled(self.given, self.layouts, iter(self.sights))
        return args

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Keyword arguments, likewise."""
        left = iter(self.sights[_num_tensors(self.given) :])
        return {name: _filled(value, self.layouts, left) for name, value in self.named.items()}

    @property
    def made(self) -> Any:
        """What it returns, likewise."""
        return _filled(self.returned, self.layouts, iter(self.sights[len(self.sights) - _num_tensors(self.returned) :]))

    @property
    def secret_writes(self) -> tuple[int, ...]:
        """Numbers of the storages that it changes though its schema does not say so."""
        if not changes_secretly(self.func):
            return ()
        return tuple(look.storage for look in looks(tuple(hidden_statistics(self.func, self.args))))

    @property
    def needs(self) -> tuple[int, ...]:
        """What it `reads` without those, of which it does not look at what they hold."""
        secret = self.secret_writes
        return tuple(number for number in self.reads if number not in secret) if secret else self.reads


class Unpacking(NamedTuple):
    """The backward asks for a saved tensor: before the call of index `position`, by the autograd node of a number.

    Attributes:
        creates_graph: The backward makes a graph of its own, which saves what it was handed.
    """

    position: int
    storage: int
    node: int
    creates_graph: bool = False


@dataclass(slots=True)
class StorageRecord:
    """What became of one storage; positions count calls, and `None` is never.

    Attributes:
        producer: Index of the call that allocated it; None when it was there before.
        is_given: It was there when the step began.
        let_go: Positions at which no tensor of the program looked at it any more.
        unsaved: Positions at which an autograd node that had saved it let go of it.
        freed: Position at which its memory was given back.
    """

    size_bytes: int
    producer: int | None
    is_parameter: bool
    is_opaque: bool
    device: torch.device
    is_given: bool = False
    let_go: list[int] = field(default_factory=list)
    unsaved: list[int] = field(default_factory=list)
    freed: int | None = None


class Layouts:
    """The ways in which tensors look at storages, each once and with a number.

    Attributes:
        opaque: Numbers of the layouts of tensors that have no storage of their own.
    """

    def __init__(self) -> None:
        self._number_of: dict[tuple[Any, ...], int] = {}
        self.opaque: set[int] = set()

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's layout."""
        where: tuple[Any, ...]
        try:
            where = tensor.shape, tensor.stride(), tensor.storage_offset()
        except RuntimeError:  # a sparse tensor has no strides; asking first takes longer than trying
            where = tensor.shape, None, 0
        dtype = tensor.dtype
        key = (type(tensor), *where, dtype, tensor.device, dtype.is_complex and tensor.is_conj(), tensor.is_neg())
        found = self._number_of.get(key)
        if found is None:
            found = self._number_of[key] = len(self._number_of)
            if storage_key(tensor) is None:
                self.opaque.add(found)
        return found

    def looks(self) -> list[Look]:
        """Return, by number, how the layouts look at storage 0, or at none."""
        return [
            Look(NO_STORAGE if strides is None else 0, tuple(shape), strides or (), int(offset), *others)
            for _, shape, strides, offset, *others in self._number_of
        ]


@dataclass
class Log:
    """The columns: an entry a call, a storage, an event.

    A *sight* is a storage and how a tensor looks at it, as one number. Where a tensor stood among arguments or results
    stands `...`, and its sight is among the call's sights: those of arguments, keyword arguments, results, in order.

    Attributes:
        overwritten: Storages that were changed after autograd had saved them: through ``.data``, or it raises later.
        sums: Positions of the sums of gradients that autograd's engine may make in place where nobody watches.
        apart: Storages that no call has made, with the positions at which they were.
        returned: Storages that the model has returned, with the positions at which it did.
    """

    layouts: Layouts = field(default_factory=Layouts)
    funcs: list[Any] = field(default_factory=list)
    args: list[tuple[Any, ...]] = field(default_factory=list)
    kwargs: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    made: list[Any] = field(default_factory=list)
    sights: list[tuple[int, ...]] = field(default_factory=list)
    writes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    size_bytes: list[int] = field(default_factory=list)
    producers: list[int | None] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)
    parameters: set[int] = field(default_factory=set)
    opaque: set[int] = field(default_factory=set)
    given: set[int] = field(default_factory=set)
    freed: dict[int, int] = field(default_factory=dict)
    let_go: list[tuple[int, int]] = field(default_factory=list)
    unsaved: list[tuple[int, int]] = field(default_factory=list)
    overwritten: set[int] = field(default_factory=set)
    unpackings: list[tuple[int, int, int, bool]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    apart: dict[int, int] = field(default_factory=dict)
    buffers: set[int] = field(default_factory=set)
    returned: dict[int, int] = field(default_factory=dict)


class Recording:
    """One recorded step. What calls and storages were is worked out when it is first asked for.

    Attributes:
        log: As it was written down.
        backward_starts: Position of the first call of the backward; None when there was none.
        is_cut: It became too long and ends somewhere.
        is_partial: Something that it saved was not asked for and waits for another backward.
        live_bytes: What the allocator of its device had live at its end; None where libraries keep nothing of it.
        has_recipes: Copies of feature maps were made, by recipes that may have held what the step was given.
        unseen_bytes: What was allocated in the forward outside of all calls, and was alive when the backward began.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.backward_starts: int | None = None
        self.is_cut = self.is_partial = self.has_recipes = False
        self.live_bytes: int | None = None
        self.unseen_bytes = 0

    @property
    def forward_calls(self) -> list[Any]:
        """What the forward called, in order."""
        return self.log.funcs[: self.backward_starts]

    @property
    def forward_places(self) -> list[Place]:
        """Where in the program these calls stand."""
        return self.log.places

    @property
    def devices(self) -> list[torch.device]:
        """Devices of the storages, in the order in which they were first seen."""
        return list(dict.fromkeys(self.log.devices))

    @cached_property
    def calls(self) -> list[Call]:
        """All calls, in order."""
        return list(_calls(self.log, self.backward_starts))

    @cached_property
    def storages(self) -> list[StorageRecord]:
        """All storages, in the order in which they were first seen."""
        log = self.log
        let_go, unsaved = _positions(log.let_go), _positions(log.unsaved)
        return [
            StorageRecord(
                size_bytes,
                producer,
                number in log.parameters,
                number in log.opaque,
                device,
                number in log.given,
                let_go.get(number, []),
                unsaved.get(number, []),
                log.freed.get(number),
            )
            for number, (size_bytes, producer, device) in enumerate(
                zip(log.size_bytes, log.producers, log.devices, strict=True)
            )
        ]

    @cached_property
    def unpackings(self) -> list[Unpacking]:
        """What the backward asked for, in order."""
        return list(itertools.starmap(Unpacking, self.log.unpackings))


def _positions(events: list[tuple[int, int]]) -> dict[int, list[int]]:
    """Return the positions of events by their storage."""
    found: dict[int, list[int]] = defaultdict(list)
    for storage, position in events:
        found[storage].append(position)
    return found


def _calls(log: Log, backward_starts: int | None) -> Iterator[Call]:
    """Yield the calls of a log."""
    layouts = log.layouts.looks()
    # What a call costs and makes does not depend on where in their storages its tensors begin.
    first_alike = {look._replace(offset=0): number for number, look in reversed(list(enumerate(layouts)))}
    shapes = [first_alike[look._replace(offset=0)] for look in layouts]
    kind_of: dict[Hashable, int] = {}
    no_kwargs: Mapping[str, Any] = {}
    first_backward = len(log.funcs) if backward_starts is None else backward_starts
    for position, (func, args, made, sights) in enumerate(zip(log.funcs, log.args, log.made, log.sights, strict=True)):
        kwargs = log.kwargs.get(position, no_kwargs)
        writes = log.writes.get(position, ())
        storages = [sight >> LAYOUT_BITS for sight in sights]
        num_read = len(sights) - _num_tensors(made)
        reads, made_storages = dict.fromkeys(storages[:num_read]), dict.fromkeys(storages[num_read:])
        allocates = tuple([number for number in made_storages if log.producers[number] == position])
        # repr tells numbers apart that are equal, as 1 and True are; an operator is slow to hash
        alike = (id(func), repr(args), repr(kwargs), *[shapes[sight & _LAYOUT] for sight in sights])
        yield Call(
            func,
            args,
            kwargs,
            made,
            sights,
            layouts,
            tuple(reads),
            allocates,
            writes,
            bool(allocates or writes) or not made_storages or not made_storages.keys() <= reads.keys(),
            position >= first_backward,
            log.places[position] if position < len(log.places) else None,
            log.modules[position],
            kind_of.setdefault(alike, len(kind_of)),
        )


def _filled(value: Any, layouts: Sequence[Look], left: Iterator[int]) -> Any:
    """Return a value with a look for each tensor."""
    if value is ...:
        sight = next(left)
        look = layouts[sight & _LAYOUT]
        return look if look.storage == NO_STORAGE else look._replace(storage=sight >> LAYOUT_BITS)
    return tuple([_filled(item, layouts, left) for item in value]) if type(value) is tuple else value


def _num_tensors(value: Any) -> int:
    if value is ...:
        return 1
    return sum(map(_num_tensors, value)) if type(value) is tuple else 0
