"""Keep a dispatch mode and saved-tensor hooks active from one call to another, with no block of code around them.

A pass begins inside a module's forward and ends at the backward, which the training code calls later; what it opened
may by then lie below modes and hooks of others. Relies on the stacks of ``torch.utils._python_dispatch`` and
``torch._C._autograd`` (torch 2.11 to 2.15).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch._dynamo import trace_rules  # private: tells which files Dynamo skips
from torch.utils._python_dispatch import (  # private: the public doors are context managers only
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
_autograd = torch._C._autograd  # noqa: SLF001 - as above


@functools.cache
def hide_from_dynamo() -> None:
    """Let Dynamo pass over the hooks of a pass: under a compiled part of the program it would try to compile them."""
    for room in ("torchecho.apply", "torchecho.capture"):
        trace_rules.add(room)


def modes_are_active() -> bool:
    """Return whether anyone has a dispatch mode active."""
    return bool(_len_torch_dispatch_stack())


def outer_hooks() -> Hooks | None:
    """Return the innermost saved-tensor hooks that are active."""
    found: Hooks | None = _autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001 - as above
    return found


def hooks_are_allowed() -> bool:
    """Return whether saved-tensor hooks may be made active: not inside `torch.func` transforms, for example."""
    return _autograd._saved_tensors_hooks_get_disabled_error_message() is None  # noqa: SLF001 - as above


def push_mode(mode: TorchDispatchMode) -> None:
    """Make a mode the innermost."""
    mode.__enter__()


def remove_mode(mode: TorchDispatchMode) -> None:
    """Take a mode off the stack, wherever it lies; nothing happens when it is not there."""
    if not any(active is mode for active in _get_current_dispatch_mode_stack()):
        return
    above = []
    while (top := _get_current_dispatch_mode_stack()[-1]) is not mode:
        above.append(top)
        _pop_mode()
    mode.__exit__(None, None, None)
    for other in reversed(above):
        _push_mode(other)


def push_hooks(hooks: Hooks) -> None:
    """Make saved-tensor hooks the innermost."""
    _autograd._push_saved_tensors_default_hooks(*hooks)  # noqa: SLF001 - as above


def remove_hooks(hooks: Hooks) -> None:
    """Take saved-tensor hooks off the stack, wherever they lie; nothing happens when they are not there."""
    above: list[Hooks] = []
    while (top := outer_hooks()) is not None and top != hooks:
        above.append(top)
        _autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001 - as above
    if top is not None:
        _autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001 - as above
    for other in reversed(above):
        push_hooks(other)
