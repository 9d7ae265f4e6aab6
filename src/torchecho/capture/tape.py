"""Record a training step as it runs, below autograd: what is called, what is made, what is kept and for how long.

A dispatch mode sees every call of forward, loss and backward; saved-tensor hooks see what autograd keeps and when the
backward asks for it; weak references see when the program, and when anyone at all, lets go of a tensor.

Relies on: tensors and storages whose Python object lives as long as the C++ one, so that weak references to it tell its
death (torch 2.11 to 2.15).

Not modelled: storages of sparse, quantized and other storage-less tensors, and of tensor subclasses (counted as 0
bytes); what is allocated outside of calls, unless whoever knows of it says so; that ``tensor.data = other`` gives a
tensor that the step made another storage.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, NoneType
from typing import Any

import torch
from torch import nn

from torchecho.capture.mode import LightMode
from torchecho.capture.place import Place, find_place
from torchecho.capture.recording import LAYOUT_BITS, Log, Recording
from torchecho.capture.schema import written_tensors
from torchecho.capture.storage import alias, storage_key
from torchecho.capture.unseen import WholeNode

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]

_MOST_CALLS = 400_000  # of a step; a program that goes on and on without a backward makes no step
_ATOMS = frozenset({int, float, bool, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format})
_ADD = torch.ops.aten.add.Tensor
_DEVICE_OF = torch.ops.prim.device.default  # asked of fake tensors, for which it is a call


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
    """A weak reference that knows which storage it is about.

    Attributes:
        key: Identity of the tensor, or of the storage, that it refers to.
        sight: How the tensor looks at the storage.
    """

    __slots__ = ("key", "sight", "storage")
    storage: int
    key: int
    sight: int


class Recorder(LightMode):
    """Records the calls made while it is active; wraps the hooks that keep saved tensors.

    Args:
        pack: Hook that keeps a saved tensor.
        unpack: Hook that gives it back; what it calls is not recorded.
        module_path: Returns the path of the module whose forward is running.
    """

    def __init__(self, pack: Pack, unpack: Unpack, module_path: Callable[[], str] = str) -> None:
        super().__init__()
        self._log = Log()
        self.recording = Recording(self._log)
        self._pack, self._unpack, self._module_path = pack, unpack, module_path
        self._layouts = self._log.layouts
        self._number_of: dict[int | None, int] = {}
        self._places: dict[tuple[int, int, int], Place] = {}
        self._lookers: dict[int, int] = {}
        self._num_alive: dict[int, int] = {}  # several of a number: what is made again beside what the program holds
        # By identity: two weak references to one tensor would be compared by comparing the tensor with itself.
        self._tensors: dict[int, _Watch] = {}
        self._others: dict[int, _Watch] = {}
        self._handed_over: list[weakref.ref[Saved]] = []
        self._saved_sights: set[int] = set()
        self._handed_on: frozenset[int | None] = frozenset()
        self._in_backward = False
        self._paused = False

    def know_sources(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are there before the step, whether or not a call reads them."""
        for tensor in tensors:
            number = self._number(tensor)
            self._log.given.add(number)
            self._lookers.setdefault(number, 0)
            self._watch_tensor(tensor, number, self._layouts.number(tensor))

    def know_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        """Count the buffers of the model, which are there before the step too, though the step may replace them."""
        numbers = [self._number(buffer) for buffer in buffers]
        self._log.given.update(numbers)
        self._log.buffers.update(numbers)

    def know_returned(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note what the model has just returned, which the program may still hold when the next step begins."""
        if not self._paused:
            self._log.returned.update((self._number(tensor), len(self._log.funcs)) for tensor in tensors)

    def know_apart(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was made outside of all calls just now."""
        if not self._paused:
            self._log.apart[self._number(tensor)] = len(self._log.funcs)

    def start_backward(self) -> None:
        """Note that what follows is the backward."""
        self._in_backward = True
        if self.recording.backward_starts is None:
            self.recording.backward_starts = len(self._log.funcs)

    def is_saving(self) -> bool:
        """Return whether something that the forward made is saved and was not let go of."""
        return any(self._log.producers[watch.storage] is not None for watch in self._saving())

    def _saving(self) -> list["_Watch"]:
        return [watch for watch in self._others.values() if type(watch()) is Saved]

    def finish(self) -> Recording:
        """Stop watching and return what was recorded."""
        self._paused = True
        self.recording.is_partial = self.is_saving()
        for watch in self._saving():  # under a tape storages may be gone that autograd still saves
            self._log.freed.pop(watch.storage, None)
        for kept in (self._tensors, self._others, self._number_of, self._num_alive, self._lookers, self._places):
            kept.clear()
        return self.recording

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a call and record it."""
        kwargs = kwargs or {}
        if self._paused or func is _DEVICE_OF:
            return func(*args, **kwargs)
        log = self._log
        position = len(log.funcs)
        if position >= _MOST_CALLS:
            self.finish().is_cut = True
            return func(*args, **kwargs)
        sights: list[int] = []
        given = self._see_given(args, sights)
        named = dict(zip(kwargs, self._see_given(tuple(kwargs.values()), sights), strict=True)) if kwargs else None
        if self._handed_on:
            self._note_sum(func, args, sights)
        writes: tuple[int, ...] = ()
        if func._schema.is_mutable:
            writes = self._see_written(written_tensors(func, args, kwargs))
        place = None if self._in_backward else self._place(func, sys._getframe(1))
        made = func(*args, **kwargs)
        log.made.append(self._see_made(made, position, sights))
        log.funcs.append(func)
        log.args.append(given)
        log.sights.append(tuple(sights))
        log.modules.append(self._module_path())
        if named:
            log.kwargs[position] = named
        if writes:
            log.writes[position] = writes
        if place is not None:
            log.places.append(place)
        return made

    def node_ran(
        self, name: str, grads: Sequence[torch.Tensor | None], made: Sequence[torch.Tensor | None], workspace_bytes: int
    ) -> None:
        """Record a node of the backward that ran unwatched: what it was handed, what it made, what else it took."""
        first = next((grad for grad in grads if grad is not None), None)
        if self._paused or first is None:  # without a gradient a node does nothing
            return
        log, sights = self._log, list[int]()
        position = len(log.funcs)
        log.args.append((self._see_given(grads, sights),))
        made_seen = self._see_made(list(made), position, sights)
        sights.append(self._new_space(workspace_bytes, position, first) << LAYOUT_BITS | self._layouts.number(first))
        log.made.append((*made_seen, ...))
        log.funcs.append(WholeNode(name))
        log.sights.append(tuple(sights))
        log.modules.append("")

    def sums_follow(self, made: Sequence[torch.Tensor | None]) -> None:
        """Take note that a node of the backward has run: the engine next adds its results to what others have made."""
        if not self._paused and not torch.is_grad_enabled():  # a graph of the backward forbids sums in place
            keys = (storage_key(tensor) for tensor in made if tensor is not None)
            self._handed_on = frozenset(self._number_of.get(key) for key in keys)

    def _note_sum(self, func: Any, args: Sequence[Any], sights: Sequence[int]) -> None:
        """Note a sum of the engine; of a view the storage is held by what it is a view of, too."""
        if func is not _ADD or len(sights) != 2 or sights[1] >> LAYOUT_BITS not in self._handed_on:
            self._handed_on = frozenset()
        elif not args[0]._is_view():
            self._log.sums.append(len(self._log.funcs))

    def _new_space(self, size_bytes: int, position: int, beside: torch.Tensor) -> int:
        """Return the number of a new storage that a call takes and gives back, beside a tensor."""
        log = self._log
        number = len(log.producers)
        log.producers.append(position)
        log.devices.append(beside.device)
        log.size_bytes.append(size_bytes)
        log.freed[number] = position + 1
        return number

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Keep a saved tensor by the wrapped hook; remember its storage and the autograd node that it is for."""
        was_paused, self._paused = self._paused, True
        try:
            kept = self._pack(tensor)
        finally:
            self._paused = was_paused
        saved = Saved(kept, self._number(tensor), node_number())
        if not self._paused:
            self._saved_sights.add(saved.storage << LAYOUT_BITS | self._layouts.number(tensor))
            watch = _Watch(saved, self._unsaved)
            watch.storage = saved.storage
            self._others[id(watch)] = watch
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
        unpacking = (len(self._log.funcs), saved.storage, saved.node, torch.is_grad_enabled())
        self._log.unpackings.append(unpacking)
        key = storage_key(saved.tensor)
        if key is not None and self._number_of.get(key) != saved.storage:
            self._know(saved.tensor.untyped_storage(), key, saved.storage)
        self._watch_tensor(saved.tensor, saved.storage, self._layouts.number(saved.tensor))
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

    def _see_given(self, values: Sequence[Any], sights: list[int]) -> tuple[Any, ...]:
        """Return values with `...` for each tensor; note the sights of the tensors."""
        seen: list[Any] = []
        for value in values:
            if type(value) in _ATOMS:
                seen.append(value)
            elif isinstance(value, torch.Tensor):
                watch = self._tensors.get(id(value))
                if watch is not None and watch() is value:
                    sights.append(watch.sight)  # what the step has made looks as it did then
                else:
                    sights.append(self._number(value) << LAYOUT_BITS | self._layouts.number(value))
                seen.append(...)
            elif isinstance(value, (list, tuple)):
                seen.append(self._see_given(value, sights))
            else:
                seen.append(value)
        return tuple(seen)

    def _see_written(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the storages that a call changes; note where that is exactly what autograd has saved before."""
        numbers = tuple([self._number(tensor) for tensor in tensors])
        for number, tensor in zip(numbers, tensors, strict=True):
            if number << LAYOUT_BITS | self._layouts.number(tensor) in self._saved_sights:
                self._log.overwritten.add(number)
        return numbers

    def _see_made(self, made: Any, position: int, sights: list[int]) -> Any:
        """Return a result with `...` for each tensor; number new storages and watch the tensors."""
        if isinstance(made, torch.Tensor):
            layout = self._layouts.number(made)
            key = None if layout in self._layouts.opaque else made.untyped_storage()._cdata
            number = self._number_of.get(key)
            if number is None:
                number = self._new_number(made, key, position)
            sights.append(self._watch_tensor(made, number, layout))
            return ...
        if isinstance(made, (list, tuple)):
            return tuple([self._see_made(item, position, sights) for item in made])
        return made

    def _place(self, func: Any, frame: FrameType) -> Place:
        """Return the place of a call, the same object for the same place."""
        place = find_place(func, frame)
        return self._places.setdefault((id(func), id(place[1]), place[2]), place)

    def _number(self, tensor: torch.Tensor) -> int:
        """Return the number of the storage behind a tensor; one that is seen first gets the next."""
        key = storage_key(tensor)
        known = self._number_of.get(key)
        return self._new_number(tensor, key, None) if known is None else known

    def _new_number(self, tensor: torch.Tensor, key: int | None, producer: int | None) -> int:
        log = self._log
        number = len(log.producers)
        log.producers.append(producer)
        log.devices.append(tensor.device)
        if producer is None:
            if isinstance(tensor, nn.Parameter):
                log.parameters.add(number)
        elif not self._in_backward:
            self._lookers[number] = 0
        if key is None:
            log.opaque.add(number)
            log.size_bytes.append(0)
        else:
            storage = tensor.untyped_storage()
            log.size_bytes.append(storage.nbytes())
            self._know(storage, key, number)
        return number

    def _know(self, storage: torch.UntypedStorage, key: int, number: int) -> None:
        """Take a storage for the one of a number, or one of several, until it dies."""
        self._number_of[key] = number
        self._num_alive[number] = self._num_alive.get(number, 0) + 1
        watch = _Watch(storage, self._freed)
        watch.storage, watch.key = number, key
        self._others[id(watch)] = watch

    def _watch_tensor(self, tensor: torch.Tensor, number: int, layout: int) -> int:
        """Know a tensor again while it lives, and return its sight; note when the program lets go of a feature map."""
        sight = number << LAYOUT_BITS | layout
        known = self._tensors.get(id(tensor))
        if known is not None and known() is tensor:
            if known.storage == number:
                known.sight = sight
                return sight
            self._others[id(known)] = known
        lookers = self._lookers.get(number)
        if lookers is None:
            watch = _Watch(tensor)
        else:
            watch = _Watch(tensor, self._let_go)
            self._lookers[number] = lookers + 1
        watch.storage, watch.sight = number, sight
        self._tensors[id(tensor)] = watch
        return sight

    def _freed(self, watch: Any) -> None:
        self._others.pop(id(watch), None)
        if self._number_of.get(watch.key) == watch.storage:
            del self._number_of[watch.key]
        left = self._num_alive[watch.storage] = self._num_alive[watch.storage] - 1
        if not left:
            self._log.freed[watch.storage] = len(self._log.funcs)

    def _unsaved(self, watch: Any) -> None:
        self._others.pop(id(watch), None)
        self._log.unsaved.append((watch.storage, len(self._log.funcs)))

    def _let_go(self, watch: Any) -> None:
        left = self._lookers[watch.storage] = self._lookers[watch.storage] - 1
        if not left:
            self._log.let_go.append((watch.storage, len(self._log.funcs)))


def node_number() -> int:
    """Return the number of the autograd node that is being made; the backward runs them in descending order."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number
