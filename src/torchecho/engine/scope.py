"""Keep modes and saved-tensor hooks active from one call to another, with no block of code around them.

A pass begins inside a module's forward and ends at the backward, which the training code calls later; what it opened
may by then lie below modes and hooks of others. Relies on the stacks of ``torch.utils._python_dispatch`` and
``torch._C._autograd`` (torch 2.11 to 2.15).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import overrides
from torch._C import _len_torch_dispatch_stack
from torch._dynamo import trace_rules  # private: tells which files Dynamo skips
from torch._dynamo.eval_frame import cached_backends  # private: what Dynamo was asked to compile with
from torch.overrides import TorchFunctionMode
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


def num_modes() -> int:
    """Return how many dispatch modes are active."""
    return int(_len_torch_dispatch_stack())


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


def push_function_mode(mode: TorchFunctionMode) -> None:
    """Make a function mode the innermost."""
    overrides._push_mode(mode)  # noqa: SLF001 - as above


def remove_function_mode(mode: TorchFunctionMode) -> None:
    """Take a function mode off the stack, wherever it lies; nothing happens when it is not there."""
    active = overrides._get_current_function_mode_stack()  # noqa: SLF001 - as above
    place = next((i for i, one in enumerate(active) if one is mode), None)
    if place is None:
        return
    for _ in active[place:]:
        overrides._pop_mode()  # noqa: SLF001 - as above
    for other in active[place + 1 :]:
        overrides._push_mode(other)  # noqa: SLF001 - as above


def has_compiled() -> bool:
    """Return whether the process has asked Dynamo to compile something, which would trace through function modes."""
    return any(backend is not None for backend in cached_backends.values())


def push_hooks(hooks: Hooks) -> None:
    """Make saved-tensor hooks the innermost."""
    _autograd._push_saved_tensors_default_hooks(*hooks)  # noqa: SLF001 - as above


def pop_hooks() -> None:
    """Take the innermost saved-tensor hooks off the stack."""
    _autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001 - as above


def remove_hooks(hooks: Hooks) -> None:
    """Take saved-tensor hooks off the stack, wherever they lie; nothing happens when they are not there."""
    above: list[Hooks] = []
    while (top := outer_hooks()) is not None and top != hooks:
        above.append(top)
        pop_hooks()
    if top is not None:
        pop_hooks()
    for other in reversed(above):
        push_hooks(other)
