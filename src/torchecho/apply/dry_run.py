"""Run the Python code that Inductor generated on tensors without bytes, and count what it would allocate.

The generated wrapper allocates, frees and reuses buffers in plain sight, and the kernels between them allocate nothing.
So the wrapper is run as it is with the kernels left out, under a fake mode: every storage it makes is counted from its
birth to its death. Calls into ATen run on fake tensors; what they allocate inside and free is asked for.

Not modelled: what a kernel of a user allocates, and the values that data-dependent code branches on.
"""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchecho.capture.describe import hint

WorkspaceOf = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], int]

_ALLOCATORS = ("cpu", "cpu_pinned", "cuda", "xpu", "mtia")


@dataclass(frozen=True)
class GeneratedHalf:
    """The code of a forward or backward graph, and the names of what goes in and comes out.

    Attributes:
        inputs: Example inputs: fake tensors and sizes.
        output_names: Node of each output; empty for one that is no node.
    """

    code: types.ModuleType
    input_names: tuple[str, ...]
    inputs: tuple[Any, ...]
    output_names: tuple[str, ...]


class NoKernel:
    """Stands for a compiled kernel: may be called in any way, and does nothing."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> "NoKernel":
        """Return another one: kernels of Triton are called by their ``run``."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class NoCompiler:
    """Stands for Inductor's ``AsyncCompile``: every kernel it is asked for is a `NoKernel`."""

    def __getattr__(self, name: str) -> Callable[..., NoKernel]:
        """Return a compiler of one kind of kernel."""
        return lambda *args, **kwargs: NoKernel()


def peak_above_start(
    forward: GeneratedHalf, backward: GeneratedHalf, *, num_forward_outputs: int, workspace_of: WorkspaceOf
) -> int:
    """Return the peak of the bytes that a forward and a backward run allocate.

    The caller holds the forward's outputs, the gradients, and the gradient of a loss to the end. What the step is given (parameters, inputs) is
    not counted.

    Args:
        forward: Its outputs are those of the user, then those that are saved for backward.
        backward: Takes saved values by the names that the forward gave them; what has another name is a tangent.
        num_forward_outputs: How many of the forward's outputs are the user's.
        workspace_of: Bytes that a call into ATen allocates inside and frees.
    """
    ledger = _Ledger(workspace_of)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), ledger:
        given = {name: ledger.outside(value) for name, value in zip(forward.input_names, forward.inputs, strict=True)}
        outputs = ledger.run(forward.code, [given[name] for name in forward.input_names])
        held = outputs[:num_forward_outputs]
        known = dict(zip(forward.output_names, outputs, strict=True))
        del outputs
        tangents = {n: ledger.made(v) for n, v in zip(backward.input_names, backward.inputs, strict=True) if n not in {**given, **known}}
        arguments = [{**given, **known, **tangents}[name] for name in backward.input_names]
        roots = [t for t in tangents.values() if isinstance(t, torch.Tensor) and t.dim() == 0]
        known.clear()
        tangents.clear()
        gradients = ledger.run(backward.code, arguments)
    del held, roots, gradients
    return ledger.peak_bytes


class _Ledger(TorchDispatchMode):
    """Counts the bytes of every storage that is made while it is on, until nothing refers to it any more."""

    def __init__(self, workspace_of: WorkspaceOf) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._counted = True
        self._workspace_of = workspace_of
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self._note(made)
        self._sample(self._workspace_of(func, args, kwargs or {}))
        return made

    def run(self, code: types.ModuleType, arguments: list[Any]) -> list[Any]:
        """Run the ``call`` of generated code with allocation made visible and kernels left out."""
        namespace = code.__dict__
        for kind in _ALLOCATORS:
            namespace[f"empty_strided_{kind}"] = self._allocator(kind)
        namespace["empty_strided"] = torch.empty_strided
        namespace["reinterpret_tensor"] = _reinterpret
        namespace["assert_size_stride"] = namespace["assert_alignment"] = NoKernel()
        for name, value in list(namespace.items()):
            if isinstance(value, torch.Tensor):
                namespace[name] = self.outside(value)
        return list(namespace["call"](arguments))

    def outside(self, value: Any) -> Any:
        """Return a tensor like `value` that is not counted; a number for a size."""
        return self._like(value, counted=False)

    def made(self, value: Any) -> Any:
        """Return a tensor like `value` that is counted; a number for a size."""
        return self._like(value, counted=True)

    def _like(self, value: Any, *, counted: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return hint(value) if isinstance(value, torch.SymInt) else value
        size, stride = [hint(n) for n in value.shape], [hint(n) for n in value.stride()]
        self._counted = counted
        like = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        self._counted = True
        return like

    def _allocator(self, kind: str) -> Callable[..., torch.Tensor]:
        device = torch.device(kind.split("_", maxsplit=1)[0])
        return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)

    def _note(self, made: Any) -> None:
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live or self._live[storage._cdata][0].expired():
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes() if self._counted else 0)

    def _sample(self, workspace_bytes: int) -> None:
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        live_bytes = sum(size for _, size in self._live.values())
        self.peak_bytes = max(self.peak_bytes, live_bytes + workspace_bytes)


def _reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _tensors(made: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(made):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield leaf
