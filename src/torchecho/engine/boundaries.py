"""Tell when a backward begins and ends, and other moments that nothing else announces.

These are: saved-tensor hooks are not wanted; a state of the random numbers is taken, which no call allocates. While
anyone listens, ``torch.autograd.backward`` (which ``Tensor.backward`` calls), ``torch.autograd.grad``, what
``torch.autograd.graph.disable_saved_tensors_hooks`` calls and ``torch.get_rng_state`` are wrapped; afterwards they are
what they were.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, Node

_bindings: Any = torch._C._autograd  # noqa: SLF001 - where the public context manager looks its function up
_lock = threading.RLock()  # a thread may end, and so stop listening, while another holds it
_originals: dict[tuple[Any, str], Callable[..., Any]] = {}
_listening: set[int] = set()  # threads


class Listener(Protocol):
    """Wants to know of the backwards of its thread."""

    def before_backward(self, *, keeps_graph: bool, roots: Sequence[Node]) -> None:
        """Prepare for a backward that begins at some nodes of the graph."""

    def after_backward(self, *, succeeded: bool) -> None:
        """Take note that the backward has ended."""

    def hooks_refused(self) -> None:
        """Take note that no saved-tensor hooks may be active from now on."""

    def allocated(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor that was made outside of all calls."""

    def close(self) -> None:
        """Take note that the thread has ended: no backward will come."""


class _Presence:
    """Dies with its thread."""


class _Current(threading.local):
    """Who listens in a thread, in a list that outlives it, and how many backwards are running inside each other."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.depth = 0
        self.presence = _Presence()
        weakref.finalize(self.presence, _thread_ended, threading.get_ident(), self.listeners).atexit = False


def listener() -> Listener | None:
    """Return who listens in this thread."""
    return _current.listeners[0] if _current.listeners else None


def listen(one: Listener) -> None:
    """Begin to listen in this thread, in place of whoever did."""
    with _lock:
        _listening.add(threading.get_ident())
        _current.listeners[:] = [one]
        if not _originals:
            _wrap(torch.autograd, "backward", _announced)
            _wrap(torch.autograd, "grad", _announced)
            _wrap(_bindings, "_saved_tensors_hooks_disable", _announced_refusal)
            _wrap(torch, "get_rng_state", _announced_state)


def _wrap(owner: Any, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    _originals[owner, name] = getattr(owner, name)
    setattr(owner, name, wrapped(_originals[owner, name]))


def stop_listening(one: Listener) -> None:
    """Stop, if it is this one that listens; the last to stop puts torch's functions back."""
    if listener() is one:
        _current.listeners.clear()
        _leave(threading.get_ident())


def _leave(thread: int) -> None:
    with _lock:
        _listening.discard(thread)
        if not _listening:
            for (owner, name), original in _originals.items():
                setattr(owner, name, original)
            _originals.clear()


def _thread_ended(thread: int, listeners: list[Listener]) -> None:
    for one in listeners:
        one.close()
    _leave(thread)


_current = _Current()


# Functions are wrapped anew in every step, and reading a signature takes as long as a small backward.
_signature_of = functools.cache(inspect.signature)


def _announced(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = _signature_of(original)

    @functools.wraps(original)
    def announced(*args: Any, **kwargs: Any) -> Any:
        one = listener()
        if one is None or _current.depth:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        one.before_backward(keeps_graph=_keeps_graph(given), roots=_roots(given))
        _current.depth += 1
        succeeded = False
        try:
            made = original(*args, **kwargs)
            succeeded = True
        finally:
            _current.depth -= 1
            if not succeeded:
                one.after_backward(succeeded=False)
        one.after_backward(succeeded=True)
        return made

    return announced


def _announced_refusal(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def announced(message: str, fail_if_non_empty: bool = True) -> Any:  # noqa: FBT001, FBT002 - as the wrapped one
        one = listener()
        if one is not None and fail_if_non_empty:
            one.hooks_refused()
        return original(message, fail_if_non_empty)

    return announced


def _announced_state(original: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    @functools.wraps(original)
    def announced() -> torch.Tensor:
        made = original()
        one = listener()
        if one is not None:
            one.allocated(made)
        return made

    return announced


def _roots(given: Mapping[str, Any]) -> list[Node]:
    """Return the nodes at which a call of backward or grad was asked to begin."""
    asked = given.get("tensors", given.get("outputs", ()))
    nodes = [_node_of(one) for one in ((asked,) if isinstance(asked, (torch.Tensor, GradientEdge)) else asked)]
    return [node for node in nodes if node is not None]


def _node_of(root: torch.Tensor | GradientEdge) -> Node | None:
    return root.grad_fn if isinstance(root, torch.Tensor) else root.node


def _keeps_graph(given: Mapping[str, Any]) -> bool:
    """Return whether a call of backward or grad was asked to keep the graph, which it does by default for a new one."""
    retain = given.get("retain_graph")
    return bool(given.get("create_graph") if retain is None else retain)
