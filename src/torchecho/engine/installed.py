"""What runs a module in place of its own call: put there, and taken away again."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

_BEFORE = "before_torchecho"


def install(model: nn.Module, runs: Callable[..., Any]) -> None:
    """Let something of ours run a module, in place of what was ours before."""
    setattr(runs, _BEFORE, _users_own(model))
    model._compiled_call_impl = runs  # noqa: SLF001 - what Module.compile() sets


def uninstall(model: nn.Module) -> None:
    """Let a module run as it did before anything of ours did, compiled where the user had compiled it."""
    model._compiled_call_impl = _users_own(model)  # noqa: SLF001 - as above


def is_compiled_by_user(model: nn.Module) -> bool:
    """Return whether it was the user who compiled what runs a module now."""
    runs = model._compiled_call_impl  # noqa: SLF001 - as above
    return isinstance(model, OptimizedModule) or (runs is not None and not hasattr(runs, _BEFORE))


def _users_own(model: nn.Module) -> Callable[..., Any] | None:
    runs: Callable[..., Any] | None = model._compiled_call_impl  # noqa: SLF001 - as above
    return getattr(runs, _BEFORE, runs)
