"""Operators written in Python and their derivatives, as PyTorch's dispatcher wants them.

`torch.library.custom_op` does the same for any operator: it walks the arguments as trees in every call and looks for
results that are arguments. For layers whose step takes a few milliseconds that is a tenth of it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # private: torch.compiler.disable loads the compiler
from torch.autograd import forward_ad

_LIBRARY = torch.library.Library("torchecho", "FRAGMENT")


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``torchecho::name`` and return it.

    Args:
        name: Its name.
        schema: Its arguments and results; no argument is written, and no result is an argument or a view of one.
        run: Computes it on tensors of any device, without derivatives.
        fake: Returns results of the right sizes and types, for tracing.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, _untraced(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchecho::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.torchecho, name).default


def differentiate(
    op: Any,
    tensors_of: Callable[..., Sequence[Tensor]],
    save: Callable[[Any, tuple[Any, ...], tuple[Tensor, ...]], None],
    backward: Callable[..., Sequence[Tensor | None]],
    plain: Callable[..., Any],
) -> None:
    """Give an operator a derivative.

    Args:
        op: The operator.
        tensors_of: Returns the tensors among its arguments that may need a gradient.
        save: Takes autograd's context, the arguments and the results, and keeps what the backward reads.
        backward: Takes the context and the gradients of the results; returns those of `tensors_of`, in that order. In
            the context's `needs_input_grad` they begin at place 1.
        plain: Computes the same by PyTorch's own operators, for derivatives that this one cannot give: those of
            forward mode and of the transforms of `torch.func`.
    """

    def below(inputs: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - no public way to what lies below autograd
            return op(*inputs)

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: tuple[Any, ...], *_: Tensor) -> Any:
            outputs = below(inputs)
            save(ctx, inputs, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            return None, *backward(ctx, *gradients)

    record: Callable[..., Any] = Recorded.apply

    def run(*inputs: Any) -> Any:
        tensors = tensors_of(*inputs)
        if _is_transformed(tensors):
            return plain(*inputs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return record(inputs, *tensors)
        return below(inputs)

    _LIBRARY.impl(op, _untraced(run), "Autograd")
    torch.library.register_vmap(op, functools.partial(_one_by_one, op), lib=_LIBRARY)


def _one_by_one(op: Any, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], Any]:
    """Run an operator for each element of a batch of its inputs, as `torch.func.vmap` asks, and stack what it makes."""
    pairs = list(zip(inputs, in_dims, strict=True))
    made = [op(*[_element(value, dim, index) for value, dim in pairs]) for index in range(info.batch_size)]
    stacked = tuple([torch.stack(results) for results in zip(*made, strict=True)])
    return stacked, (0,) * len(stacked)


def _element(value: Any, dim: Any, index: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [_element(one, its_dim, index) for one, its_dim in zip(value, dim or [None] * len(value), strict=True)]
    return value if dim is None else value.select(dim, index)


def _is_transformed(tensors: Sequence[Tensor]) -> bool:
    """Return whether a transform of `torch.func` is running, or a tensor carries a tangent."""
    if torch._C._are_functorch_transforms_active():  # noqa: SLF001 - no public way to ask
        return True
    level = forward_ad._current_level  # noqa: SLF001 - as above; asking each tensor takes longer
    return level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one that torch.compile does not look into."""
    untraced: Callable[..., Any] = _disable_dynamo(functools.partial(function))  # a method would take no attribute
    return untraced
