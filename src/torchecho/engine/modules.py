"""Know which module's forward is running, and what a module holds."""

from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers of a model, each storage once; lazy ones are not there yet."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)]
    storages = {storage._cdata: storage.nbytes() for storage in map(torch.Tensor.untyped_storage, tensors)}  # noqa: SLF001 - its identity; fake ones have no address
    return sum(storages.values())


def buffers_of(model: nn.Module | None) -> list[torch.Tensor]:
    """Return the buffers of a model that are there; of no model none."""
    return [] if model is None else [buffer for buffer in model.buffers() if not is_lazy(buffer)]


def compiled_parts(model: nn.Module) -> list[nn.Module]:
    """Return what the program has compiled of a model: the whole, or the outermost compiled modules in it."""
    if isinstance(model, OptimizedModule) or model._compiled_call_impl is not None:  # noqa: SLF001 - what Module.compile() sets
        return [model]
    return [part for child in model.children() for part in compiled_parts(child)]


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was given; the compiled one calls it from now on as it is."""
    if not isinstance(model, OptimizedModule):
        return model
    inner: nn.Module = model._orig_mod  # noqa: SLF001 - no public way

    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    model.forward = forward  # the wrapper hands other names on to the module inside
    return inner


class ModulePath:
    """Follows the forwards of all modules; paths are those of a model, or names of classes where it is not known.

    Args:
        model: Module whose submodules have paths.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._names = {id(module): name for name, module in (model.named_modules() if model is not None else ())}
        self._running: list[str] = []
        self._handles: list[Any] = []

    def start(self) -> None:
        """Begin to follow."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Follow no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def current(self) -> str:
        """Return the path of the module whose forward is running; empty outside of any."""
        return self._running[-1] if self._running else ""

    def _enter(self, module: nn.Module, args: object) -> None:  # noqa: ARG002 - the signature of a hook
        self._running.append(self._names.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:  # noqa: ARG002 - the signature of a hook
        if self._running:
            self._running.pop()
