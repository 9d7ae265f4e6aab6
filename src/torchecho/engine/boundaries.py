"""Tell when a backward begins and ends: the training code calls it, and nothing else announces it.

While anyone listens, ``torch.autograd.backward`` (which ``Tensor.backward`` calls) and ``torch.autograd.grad`` are
wrapped; afterwards they are what they were.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

_names = ("backward", "grad")
_lock = threading.Lock()
_originals: dict[str, Callable[..., Any]] = {}
_listening: set[int] = set()  # threads


class Listener(Protocol):
    """Wants to know of the backwards of its thread."""

    def before_backward(self, *, keeps_graph: bool) -> None:
        """Prepare for a backward."""

    def after_backward(self, *, succeeded: bool) -> None:
        """Take note that the backward has ended."""


class _Current(threading.local):
    """The listener of a thread, and how many backwards are running inside each other."""

    listener: Listener | None = None
    depth: int = 0


_current = _Current()


def listener() -> Listener | None:
    """Return who listens in this thread."""
    return _current.listener


def listen(one: Listener) -> None:
    """Begin to listen in this thread, in place of whoever did."""
    with _lock:
        _listening.add(threading.get_ident())
        _current.listener = one
        if not _originals:
            for name in _names:
                _originals[name] = getattr(torch.autograd, name)
                setattr(torch.autograd, name, _announced(_originals[name]))


def stop_listening(one: Listener) -> None:
    """Stop, if it is this one that listens; the last to stop puts torch's functions back."""
    with _lock:
        if _current.listener is not one:
            return
        _current.listener = None
        _listening.discard(threading.get_ident())
        if not _listening:
            for name, original in _originals.items():
                setattr(torch.autograd, name, original)
            _originals.clear()


# Functions are wrapped anew in every step, and reading a signature takes as long as a small backward.
_signature_of = functools.cache(inspect.signature)


def _announced(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = _signature_of(original)

    @functools.wraps(original)
    def announced(*args: Any, **kwargs: Any) -> Any:
        one = _current.listener
        if one is None or _current.depth:
            return original(*args, **kwargs)
        one.before_backward(keeps_graph=_keeps_graph(signature.bind(*args, **kwargs).arguments))
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


def _keeps_graph(given: Mapping[str, Any]) -> bool:
    """Return whether a call of backward or grad was asked to keep the graph, which it does by default for a new one."""
    retain = given.get("retain_graph")
    return bool(given.get("create_graph") if retain is None else retain)
