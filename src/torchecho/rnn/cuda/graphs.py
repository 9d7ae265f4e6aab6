"""The time loop of a chunk as a CUDA graph: launched once, where the same sizes come again.

A graph works on memory of its own, so what it reads is copied there before and what it wrote is copied from there
after. The copies are as large as a chunk, not as a sequence; a loop of many small launches costs more than they do.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor | None]
Body = Callable[[Tensors], None]

_MOST_GRAPHS = 16
_MOST_BYTES = 2**28  # of one graph's own memory
_TIMES_BEFORE_CAPTURE = 2


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    own: Tensors


_seen: OrderedDict[Hashable, int] = OrderedDict()
_captured: OrderedDict[Hashable, _Captured] = OrderedDict()
_lock = threading.RLock()


@dataclass(frozen=True)
class Access:
    """Which tensors of a loop are written, and which of them (or of its scratch) are not read before."""

    written: frozenset[str]
    unread: frozenset[str]


def access(written: str, unread: str) -> Access:
    """Return an `Access` from names that are parted by blanks."""
    return Access(frozenset(written.split()), frozenset(unread.split()))


def run(body: Body, name: Hashable, tensors: Tensors, uses: Access, *, repeats: bool) -> None:
    """Run a time loop: at once, or as a graph from the third time that it comes with the same sizes.

    Args:
        body: Launches the loop on the tensors that it is given, and allocates nothing.
        name: Tells apart loops whose tensors are of the same sizes.
        tensors: What the loop reads and writes, by name.
        uses: How it uses them; those not named are read only.
        repeats: Whether the sizes may come again; packed batches hardly repeat.
    """
    present = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    if not (repeats and _can_capture(present)):
        body(tensors)
        return
    key = _key(name, present)
    with _lock:
        captured = _captured.get(key)
        if captured is None and _comes_again(key):
            captured = _captured[key] = _capture(body, tensors)
        if captured is None:
            body(tensors)
            return
        _captured.move_to_end(key)
        if len(_captured) > _MOST_GRAPHS:
            _captured.popitem(last=False)
        _replay(captured, present, uses)


def required(tensors: Tensors, *names: str) -> tuple[Tensor, ...]:
    """Return the tensors of some names, none of which may be missing."""
    found = tuple(tensor for tensor in (tensors[name] for name in names) if tensor is not None)
    assert len(found) == len(names)
    return found


def clear() -> None:
    """Forget all graphs, and free their memory."""
    with _lock:
        _captured.clear()
        _seen.clear()


def _can_capture(tensors: Mapping[str, Tensor]) -> bool:
    return (
        all(tensor.is_cuda for tensor in tensors.values())
        and sum(tensor.nbytes for tensor in tensors.values()) <= _MOST_BYTES
        and not torch.cuda.is_current_stream_capturing()
    )


def _key(name: Hashable, tensors: Mapping[str, Tensor]) -> Hashable:
    """Return what a graph is good for; streams do not share one, since its memory is written on each."""
    device = next(iter(tensors.values())).device
    shapes = tuple((key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items())
    precision = torch.backends.cuda.matmul.allow_tf32
    return name, shapes, device, torch.cuda.current_stream(device).cuda_stream, precision


def _comes_again(key: Hashable) -> bool:
    times = _seen[key] = _seen.pop(key, 0) + 1
    if len(_seen) > 8 * _MOST_GRAPHS:
        _seen.popitem(last=False)
    return times > _TIMES_BEFORE_CAPTURE


def _capture(body: Body, tensors: Tensors) -> _Captured:
    own = {
        key: None if tensor is None else torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        for key, tensor in tensors.items()
    }
    # Alignment of its own memory may ask for other variants of the kernels, and nothing can be loaded while capturing.
    body(own)
    graph = torch.cuda.CUDAGraph()
    # Other threads (autograd runs backward passes on its own) may go on using the device.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body(own)
    return _Captured(graph, own)


def _replay(captured: _Captured, tensors: Mapping[str, Tensor], uses: Access) -> None:
    own = {key: tensor for key, tensor in captured.own.items() if tensor is not None}
    read = [key for key in tensors if key not in uses.unread]
    _copy_all([own[key] for key in read], [tensors[key] for key in read])
    captured.graph.replay()
    written = [key for key in tensors if key in uses.written]
    _copy_all([tensors[key] for key in written], [own[key] for key in written])


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors, those of one type by one launch: a launch each would take longer than the copies."""
    for dtype in dict.fromkeys(target.dtype for target in targets):
        pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t.dtype == dtype]
        torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])
