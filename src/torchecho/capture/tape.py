"""Record a training step as it runs, below autograd: what is called, what is made, what is kept and for how long.

A dispatch mode sees every call of forward, loss and backward; saved-tensor hooks see what autograd keeps and when the
backward asks for it; weak references see when the program, and when anyone at all, lets go of a tensor.

Relies on: tensors and storages whose Python object lives as long as the C++ one, so that weak references to it tell its
death (torch 2.11 to 2.15); ``UntypedStorage._cdata`` as the identity of a storage.

Not modelled: storages of sparse, quantized and other storage-less tensors, and of tensor subclasses (counted as 0
bytes); what is allocated outside of calls, such as the states of generators that `torch.utils.checkpoint` keeps.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchecho.capture.describe import Look
from torchecho.capture.place import Place, find_place
from torchecho.capture.schema import written_tensors
from torchecho.capture.unseen import WholeNode

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]

NO_STORAGE = -1
_MOST_CALLS = 400_000  # of a step; a program that goes on and on without a backward makes no step
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)


class Call(NamedTuple):
    """One call: of what, on what, what it made. A tuple, because thousands are made while a step runs.

    Attributes:
        args: Positional arguments with a `Look` for every tensor.
        kwargs: Keyword arguments, likewise.
        reads: Numbers of the storages that it reads, each once.
        made: What it returns, with a `Look` for every tensor.
        allocates: Numbers of the storages that it allocates.
        writes: Numbers of the storages that it changes in place.
        place: Where in the program it stands; None in the backward.
        module: Path of the module whose forward was running.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: tuple[int, ...]
    made: Any
    allocates: tuple[int, ...]
    writes: tuple[int, ...]
    in_backward: bool
    place: Place | None
    module: str


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
    lookers: int = 0


@dataclass
class Recording:
    """One recorded step: plain data.

    Attributes:
        backward_starts: Position of the first call of the backward; None when there was none.
        is_cut: It became too long and ends somewhere.
        live_bytes: What the allocator of its device had live at its end; None where libraries keep nothing of it.
        is_partial: Something that it saved was not asked for and waits for another backward.
        unseen_bytes: What was allocated in the forward outside of all calls, and was alive when the backward began.
    """

    calls: list[Call] = field(default_factory=list)
    storages: list[StorageRecord] = field(default_factory=list)
    unpackings: list[Unpacking] = field(default_factory=list)
    backward_starts: int | None = None
    is_cut: bool = False
    live_bytes: int | None = None
    is_partial: bool = False
    unseen_bytes: int = 0


class Saved:
    """What the recorder keeps of a saved tensor: what the wrapped hook kept, its storage and its autograd node.

    Attributes:
        tensor: The tensor, from when the backward asks for it until its node has run.
    """

    __slots__ = ("__weakref__", "inner", "node", "storage", "tensor")

    def __init__(self, inner: Any, storage: int, node: int) -> None:
        self.inner, self.storage, self.node = inner, storage, node
        self.tensor: torch.Tensor | None = None


class _Watch(weakref.ref[Any]):
    """A weak reference that knows which storage it is about."""

    __slots__ = ("storage",)
    storage: int


class Recorder(TorchDispatchMode):
    """Records the calls made while it is active; wraps the hooks that keep saved tensors.

    Args:
        pack: Hook that keeps a saved tensor.
        unpack: Hook that gives it back; what it calls is not recorded.
        module_path: Returns the path of the module whose forward is running.
    """

    def __init__(self, pack: Pack, unpack: Unpack, module_path: Callable[[], str] = str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._pack, self._unpack, self._module_path = pack, unpack, module_path
        self._number_of: dict[int, int] = {}
        # By identity: two weak references to one tensor would be compared by comparing the tensor with itself.
        self._watches: dict[int, _Watch] = {}
        self._saved: dict[int, _Watch] = {}
        self._handed_over: list[weakref.ref[Saved]] = []
        self._in_backward = False
        self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: what guards a mode's calls from Dynamo costs a microsecond a call."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled parts of the program stay compiled, and are not looked into."""
        return True

    def know_sources(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are there before the step, whether or not a call reads them."""
        for tensor in tensors:
            self.recording.storages[self._number(tensor)].is_given = True

    def start_backward(self) -> None:
        """Note that what follows is the backward."""
        self._in_backward = True
        if self.recording.backward_starts is None:
            self.recording.backward_starts = len(self.recording.calls)

    def is_saving(self) -> bool:
        """Return whether something that the forward made is saved and was not let go of."""
        return any(self.recording.storages[w.storage].producer is not None for w in self._saved.values())

    def finish(self) -> Recording:
        """Stop watching and return what was recorded."""
        self._paused = True
        self.recording.is_partial = self.is_saving()
        for watch in self._saved.values():  # under a tape storages may be gone that autograd still saves
            self.recording.storages[watch.storage].freed = None
        self._saved.clear()
        self._watches.clear()
        self._number_of.clear()
        return self.recording

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a call and record it."""
        kwargs = kwargs or {}
        if self._paused or func is torch.ops.prim.device.default:  # asked of fake tensors, for which it is a call
            return func(*args, **kwargs)
        position = len(self.recording.calls)
        if position >= _MOST_CALLS:
            self.finish().is_cut = True
            return func(*args, **kwargs)
        reads: dict[int, None] = {}
        looks = self._look(args, reads)
        keyword_looks = {name: self._look(value, reads) for name, value in kwargs.items()}
        writes: tuple[int, ...] = ()
        if func._schema.is_mutable:
            writes = tuple(self._number(t) for t in written_tensors(func, args, kwargs))
        place = None if self._in_backward else find_place(func, sys._getframe(1))
        made = func(*args, **kwargs)
        allocates: dict[int, None] = {}
        outputs = self._look_at_made(made, position, allocates)
        self.recording.calls.append(
            Call(
                func,
                looks,
                keyword_looks,
                tuple(reads),
                outputs,
                tuple(allocates),
                writes,
                self._in_backward,
                place,
                self._module_path(),
            )
        )
        return made

    def node_ran(
        self, name: str, grads: Sequence[torch.Tensor | None], made: Sequence[torch.Tensor | None], workspace_bytes: int
    ) -> None:
        """Record a node of the backward that ran unwatched: what it was handed, what it made, what else it took."""
        if self._paused:
            return
        position, storages, reads = len(self.recording.calls), self.recording.storages, dict[int, None]()
        looks = self._look(grads, reads)
        allocates: dict[int, None] = {len(storages): None}
        device = next((grad.device for grad in grads if grad is not None), torch.device("cpu"))
        storages.append(StorageRecord(workspace_bytes, position, False, False, device, freed=position + 1))
        outputs = self._look_at_made(made, position, allocates)
        call = Call(WholeNode(name), looks, {}, tuple(reads), outputs, tuple(allocates), (), True, None, "")
        self.recording.calls.append(call)

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Keep a saved tensor by the wrapped hook; remember its storage and the autograd node that it is for."""
        was_paused, self._paused = self._paused, True
        try:
            kept = self._pack(tensor)
        finally:
            self._paused = was_paused
        saved = Saved(kept, self._number(tensor), node_number())
        if not self._paused:
            watch = _Watch(saved, self._unsaved)
            watch.storage = saved.storage
            self._saved[id(watch)] = watch
        return saved

    def unpack(self, saved: Saved) -> torch.Tensor:
        """Give a saved tensor back by the wrapped hook; note that the backward asked for it."""
        if saved.tensor is not None:
            return saved.tensor
        was_paused, self._paused = self._paused, True
        try:
            tensor = self._unpack(saved.inner)
            if was_paused:
                return tensor
            self._take_back(saved.node)
            # Each node holds one of its own, so that each is let go of when its node has run.
            saved.tensor = tensor if tensor.is_leaf and tensor.requires_grad else alias(tensor)
            self._handed_over.append(weakref.ref(saved))
        finally:
            self._paused = was_paused
        # Autograd enables gradients inside a backward only where that makes a graph.
        unpacking = Unpacking(len(self.recording.calls), saved.storage, saved.node, torch.is_grad_enabled())
        self.recording.unpackings.append(unpacking)
        self._know(saved.tensor, saved.storage)
        self._watch_tensor(saved.tensor, saved.storage)
        return saved.tensor

    def _take_back(self, node: int) -> None:
        """Let go of what nodes that have run were handed, where a graph that is kept still holds it."""
        last = self._handed_over[-1]() if self._handed_over else None
        if last is not None and last.node == node:
            return
        for reference in self._handed_over:
            saved = reference()
            if saved is not None:
                saved.tensor = None
        self._handed_over.clear()

    def _look(self, value: Any, reads: dict[int, None]) -> Any:
        if isinstance(value, torch.Tensor):
            number = self._number(value)
            reads[number] = None
            return look_at(value, number)
        if isinstance(value, (list, tuple)):
            return tuple(self._look(item, reads) for item in value)
        return value

    def _look_at_made(self, value: Any, position: int, allocates: dict[int, None]) -> Any:
        if isinstance(value, torch.Tensor):
            known = len(self.recording.storages)
            number = self._number(value, position)
            if number >= known:
                allocates[number] = None
            self._watch_tensor(value, number)
            return look_at(value, number)
        if isinstance(value, (list, tuple)):
            return tuple(self._look_at_made(item, position, allocates) for item in value)
        return value

    def _number(self, tensor: torch.Tensor, producer: int | None = None) -> int:
        """Return the number of the storage behind a tensor; one that is seen first gets the next."""
        key = storage_key(tensor)
        known = None if key is None else self._number_of.get(key)
        if known is not None:
            return known
        size_bytes = 0 if key is None else tensor.untyped_storage().nbytes()
        is_parameter = producer is None and isinstance(tensor, nn.Parameter)
        self.recording.storages.append(StorageRecord(size_bytes, producer, is_parameter, key is None, tensor.device))
        number = len(self.recording.storages) - 1
        if key is not None:
            self._know(tensor, number)
        return number

    def _know(self, tensor: torch.Tensor, number: int) -> None:
        """Take the storage behind a tensor for the one of a number, until it dies."""
        key = storage_key(tensor)
        if key is None or self._number_of.get(key) == number:
            return
        self._number_of[key] = number

        def freed(watch: Any) -> None:
            self._watches.pop(id(watch), None)
            if self._number_of.get(key) == watch.storage:
                del self._number_of[key]
            self.recording.storages[watch.storage].freed = len(self.recording.calls)

        watch = _Watch(tensor.untyped_storage(), freed)
        watch.storage = number
        self._watches[id(watch)] = watch

    def _watch_tensor(self, tensor: torch.Tensor, number: int) -> None:
        watch = _Watch(tensor, self._let_go)
        watch.storage = number
        self._watches[id(watch)] = watch
        self.recording.storages[number].lookers += 1

    def _unsaved(self, watch: Any) -> None:
        self._saved.pop(id(watch), None)
        self.recording.storages[watch.storage].unsaved.append(len(self.recording.calls))

    def _let_go(self, watch: Any) -> None:
        self._watches.pop(id(watch), None)
        record = self.recording.storages[watch.storage]
        record.lookers -= 1
        if not record.lookers:
            record.let_go.append(len(self.recording.calls))


def node_number() -> int:
    """Return the number of the autograd node that is being made; the backward runs them in descending order."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor on the same storage, which is no part of the autograd graph and no call of the program."""
    if type(tensor) is FakeTensor:  # without its mode it would be a tensor without data; the recorder is paused here
        return tensor.detach()
    guard = torch._C._DisableTorchDispatch()
    made = tensor.detach()
    del guard
    return made


def look_at(tensor: torch.Tensor, number: int) -> Look:
    """Return how a tensor looks at the storage of a number."""
    if tensor.layout != torch.strided:
        return Look(NO_STORAGE, tuple(tensor.shape), (), 0, tensor.dtype, tensor.device)
    offset = int(tensor.storage_offset())
    dtype = tensor.dtype
    is_conj = dtype.is_complex and tensor.is_conj()
    return Look(number, tuple(tensor.shape), tensor.stride(), offset, dtype, tensor.device, is_conj, tensor.is_neg())


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return the identity of the storage behind a tensor; None for a tensor that has none, or is a subclass."""
    if type(tensor) not in _PLAIN_TYPES or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    key: int = tensor.untyped_storage()._cdata
    return key
