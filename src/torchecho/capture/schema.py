"""Read off an operator's schema what a call of it writes to."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten

# In training these change running statistics, which their schema does not say, and do not read them. Positions of the
# statistics, and of the flag that says training where there is one.
_HIDDEN_STATISTICS: Mapping[Any, tuple[slice, int | None]] = {
    _aten.native_batch_norm.default: (slice(3, 5), 5),
    _aten.cudnn_batch_norm.default: (slice(3, 5), 5),
    _aten.miopen_batch_norm.default: (slice(3, 5), 5),
    _aten.batch_norm_update_stats.default: (slice(1, 3), None),
    _aten.batch_norm_gather_stats.default: (slice(3, 5), None),
    _aten.batch_norm_gather_stats_with_counts.default: (slice(3, 5), None),
}


def hidden_statistics(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments that a call changes though the schema of the operator does not say so, and does not read."""
    where = _where_hidden(func, args)
    return () if where is None else args[where]


def without_statistics(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of a call with None for those statistics: it computes the same, and changes nothing."""
    where = _where_hidden(func, args)
    return args if where is None else (*args[: where.start], None, None, *args[where.stop :])


def changes_secretly(func: Any) -> bool:
    """Return whether calls of an operator may change what its schema does not mention."""
    return func in _HIDDEN_STATISTICS


def always_changes_secretly(func: Any) -> bool:
    """Return whether every call of an operator does: there is no flag that forbids it."""
    hidden = _HIDDEN_STATISTICS.get(func)
    return hidden is not None and hidden[1] is None


def _where_hidden(func: Any, args: Sequence[Any]) -> slice | None:
    hidden = _HIDDEN_STATISTICS.get(func)
    if hidden is None:
        return None
    where, training = hidden
    return where if training is None or args[training] else None


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call changes in place, by the schema of the operator."""
    written: list[torch.Tensor] = []
    for position, name in _written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            written.append(value)
        else:
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of each argument that an operator writes to; asking the schema anew costs a small op."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
