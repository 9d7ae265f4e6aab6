"""Who computes a layer: the kernels or the reference; and gradients through the reference."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchecho.rnn.cuda.available import triton_takes
from torchecho.rnn.library import library

#: The stash of a forward that no backward will follow.
NO_STASH = "none"


#: The types of number that the C++ kernels take; they compute in float32.
_CPP_DTYPES = (torch.float32, torch.bfloat16)


def runs_natively(tensors: Sequence[Tensor]) -> bool:
    """Return whether kernels take these tensors: Triton's on CUDA, C++ ones on the CPU; else the reference does."""
    return triton_takes(tensors) or cpp_takes(tensors)


def kernels_for(family: str, tensors: Sequence[Tensor]) -> Any:
    """Return the module whose `forward` and `backward` run a family on tensors that `runs_natively` accepts."""
    # Triton is optional, so nothing that needs it is imported before it is wanted.
    return importlib.import_module(f"torchecho.rnn.{family}.{'gpu' if triton_takes(tensors) else 'native'}")


def cpp_takes(tensors: Sequence[Tensor]) -> bool:
    """Return whether the C++ kernels take these tensors: all on the CPU, all of one type of `_CPP_DTYPES`."""
    dtype = tensors[0].dtype
    alike = all(t.dtype == dtype and t.device.type == "cpu" for t in tensors)
    return alike and dtype in _CPP_DTYPES and library() is not None


def needs_backward(tensors: Sequence[Tensor]) -> bool:
    """Return whether autograd will record an op on these tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def reference_gradients(
    forward: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Differentiate the reference at `inputs`; the gradients can be differentiated again if grad mode is on.

    Args:
        forward: Takes all inputs and returns as many outputs as there are `grad_outputs`.
        inputs: Where to differentiate; those that require no gradient get None.
        grad_outputs: Gradients of the outputs; None stands for zeros.
    """
    again = torch.is_grad_enabled()
    needed = [t.requires_grad for t in inputs]
    with torch.enable_grad():
        if not again:
            inputs = [t.detach().requires_grad_(need) for t, need in zip(inputs, needed, strict=True)]
        outputs = forward(*inputs)
        pairs = [(o, g) for o, g in zip(outputs, grad_outputs, strict=True) if g is not None]
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
        results, gradients = [o for o, _ in pairs], [g for _, g in pairs]
        found = iter(torch.autograd.grad(results, wanted, gradients, create_graph=again, allow_unused=True))
    return [next(found) if need else None for need in needed]
