"""Which ops of a joint graph may run twice, and why not.

The rules are the faults of docs/correctness.md turned round: what cannot be repeated exactly, or is not known to be
repeatable, is stashed.
"""

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

# Namespaces whose ops are pure functions of their tensor arguments unless their schema or tags say otherwise.
_PURE_NAMESPACES = frozenset({"aten", "prims", "prim"})

# The choice these ops make is discontinuous: a last-digit drift of their input flips it.
_CHOICES = frozenset({"topk", "argmax", "argmin", "sort", "argsort", "msort", "kthvalue", "bucketize", "searchsorted"})

# On CUDA these sum with atomics, so two runs may differ in the last digits.
_ATOMIC_ON_CUDA = frozenset(
    {"index_put", "_unsafe_index_put", "index_add", "scatter_add", "scatter_reduce", "cumsum", "histc", "bincount"}
)

# Tagged as random whatever their dropout probability, although with probability 0 they draw nothing.
_ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)


def keep_reason(node: fx.Node) -> str:  # noqa: PLR0911 - one return a rule reads as the list that it is
    """Return why the op of a joint-graph node may not be repeated, or an empty string when it may."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return "not a plain operator"
    name = target._schema.name.split("::")[1]
    if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
        return "marked MUST_SAVE"
    if target.namespace not in _PURE_NAMESPACES:
        return f"custom operator {target.namespace}::{name}: not known to be repeatable"
    if target._schema.is_mutable:
        return "changes its arguments"
    if torch.Tag.nondeterministic_seeded in target.tags and not _draws_nothing(node, name):
        return "draws random numbers"
    if name in _CHOICES:
        return "makes a discontinuous choice"
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(target.tags):
        return "output depends on values"
    if name in _ATOMIC_ON_CUDA and _on_cuda(node):
        return "sums in an order that varies on CUDA"
    return ""


def _draws_nothing(node: fx.Node, name: str) -> bool:
    if name not in _ATTENTION:
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.name == "dropout_p":
            return bool(given == 0.0)
    return bool(node.kwargs.get("dropout_p", 0.0) == 0.0)


def _on_cuda(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return isinstance(first, torch.Tensor) and first.device.type == "cuda"
