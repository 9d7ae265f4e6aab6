"""Which ops of a joint graph may run twice, and why not.

The rules are the faults of docs/correctness.md turned round: what cannot be repeated exactly, or is not known to be
repeatable, is stashed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchecho.capture.schema import always_changes_secretly

# Namespaces whose ops are pure functions of their tensor arguments unless their schema or tags say otherwise.
# torchecho's own give the same bits whenever they run.
_PURE_NAMESPACES = frozenset({"aten", "prims", "prim", "torchecho"})

# The choice these ops make is discontinuous: a last-digit drift of their input flips it.
_CHOICES = frozenset({"topk", "argmax", "argmin", "sort", "argsort", "msort", "kthvalue", "bucketize", "searchsorted"})

# On CUDA these sum with atomics, so two runs may differ in the last digits.
_ATOMIC_ON_CUDA = frozenset(
    {"index_put", "_unsafe_index_put", "index_add", "scatter_add", "scatter_reduce", "cumsum", "histc", "bincount"}
)

# Attention and recurrent layers are tagged as random whatever their probability is, although with 0 they draw nothing.
_PROBABILITIES = ("dropout_p", "dropout")

# What these make is whatever the memory held before.
_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


def keep_reason(node: fx.Node) -> str:
    """Return why the op of a joint-graph node may not be repeated, or an empty string when it may."""
    if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
        return "marked MUST_SAVE"
    return keep_reason_of_call(node.target, node.args, node.kwargs, on_cuda=_on_cuda(node))


def keep_reason_of_call(target: object, args: Sequence[Any], kwargs: Mapping[str, Any], *, on_cuda: bool) -> str:
    """Return why a call may not be repeated, or an empty string when it may.

    Args:
        target: What is called.
        args: Positional arguments; tensors may be stood for by anything, only numbers are looked at.
        kwargs: Keyword arguments, likewise.
        on_cuda: Whether it runs on a CUDA device.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return "not a plain operator"
    name = target._schema.name.split("::")[1]
    if target.namespace not in _PURE_NAMESPACES:
        return f"custom operator {target.namespace}::{name}: not known to be repeatable"
    if target._schema.is_mutable or always_changes_secretly(target):
        return "changes its arguments"
    return _reason_apart_from_changes(target, name, args, kwargs, on_cuda=on_cuda)


def may_follow(target: object, args: Sequence[Any], kwargs: Mapping[str, Any], *, on_cuda: bool) -> bool:
    """Return whether a call that changes its arguments in place may be repeated on a fresh copy of them.

    Args:
        target: What is called; anything that is no change in place of values alone may not.
        args: As in `keep_reason_of_call`.
        kwargs: Likewise.
        on_cuda: Likewise.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _PURE_NAMESPACES:
        return False
    name = target._schema.name.split("::")[1]
    if not target._schema.is_mutable or not name.endswith("_") or torch.Tag.inplace_view in target.tags:
        return False  # a change of shape or storage, or an `out=` that may be given memory of another size
    return not _reason_apart_from_changes(target, name.removesuffix("_"), args, kwargs, on_cuda=on_cuda)


def _reason_apart_from_changes(
    target: torch._ops.OpOverload, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, on_cuda: bool
) -> str:
    if torch.Tag.nondeterministic_seeded in target.tags and not _draws_nothing(target, args, kwargs):
        return "draws random numbers"
    if name in _CHOICES:
        return "makes a discontinuous choice"
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(target.tags):
        return "output depends on values"
    if name in _UNINITIALISED:
        return "hands out memory as it is"
    if name in _ATOMIC_ON_CUDA and on_cuda:
        return "sums in an order that varies on CUDA"
    return ""


def _draws_nothing(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call that is tagged as random has a dropout probability, and it is 0."""
    for argument, given in zip(target._schema.arguments, args, strict=False):
        if argument.name in _PROBABILITIES:
            return bool(given == 0.0)
    takes = [argument.name for argument in target._schema.arguments if argument.name in _PROBABILITIES]
    return bool(takes) and bool(kwargs.get(takes[0], 0.0) == 0.0)


def _on_cuda(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return isinstance(first, torch.Tensor) and first.device.type == "cuda"
