"""Find backward ops that may write their result over an operand that nobody reads any more.

Autograd's engine accumulates gradients in place; a functional graph allocates a new sum each time. Backward ops run
once and in one order whatever the plan, and only backward ops read what they make, so the last reader of each of their
storages is known at capture: an elementwise op that is it may write there. The kernel and its operands stay the same,
and so does every bit of the result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from torchecho.capture.describe import hint
from torchecho.ir.graph import Category, Op, Phase, Storage, Value

_aten = torch.ops.aten

# Op, its in-place form, the keyword of the operand to write over (empty: the first argument), which operands may be.
_FORMS: Mapping[object, tuple[torch._ops.OpOverload, str, tuple[int, ...]]] = {
    _aten.add.Tensor: (_aten.add_.Tensor, "", (0, 1)),
    _aten.mul.Tensor: (_aten.mul_.Tensor, "", (0, 1)),
    _aten.sub.Tensor: (_aten.sub_.Tensor, "", (0,)),
    _aten.div.Tensor: (_aten.div_.Tensor, "", (0,)),
    _aten.tanh_backward.default: (_aten.tanh_backward.grad_input, "grad_input", (0,)),
    _aten.sigmoid_backward.default: (_aten.sigmoid_backward.grad_input, "grad_input", (0,)),
    _aten.threshold_backward.default: (_aten.threshold_backward.grad_input, "grad_input", (0,)),
}


@dataclass(frozen=True, slots=True)
class InPlace:
    """How an op writes over an operand: the form to call, and the position of the operand."""

    form: torch._ops.OpOverload
    keyword: str
    operand: int


def in_place_call(node: fx.Node, way: InPlace) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments, as joint nodes, of the in-place form of a node."""
    args = list(node.args)
    if way.keyword:
        return tuple(args), {**node.kwargs, way.keyword: args[way.operand]}
    args[0], args[way.operand] = args[way.operand], args[0]
    return tuple(args), dict(node.kwargs)


def find_in_place(
    ops: Sequence[Op],
    values: list[Value],
    storages: list[Storage],
    op_nodes: Sequence[fx.Node],
    values_of: Mapping[fx.Node, tuple[int, ...]],
) -> dict[int, InPlace]:
    """Let backward ops write over operands: changes `values` and `storages`, returns how each such op is called.

    A storage that is merged into an operand's keeps its place in `storages` with no bytes and no producer.
    """
    last_reader: dict[int, int] = {}
    for index, op in enumerate(ops):
        if not op.is_view:
            last_reader.update((values[v].storage, index) for v in op.reads)
    looking: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        looking.setdefault(value.storage, []).append(index)
    ways: dict[int, InPlace] = {}
    for index, op in enumerate(ops):
        if op.phase != Phase.BACKWARD or op_nodes[index].target not in _FORMS:
            continue
        made = values[op.writes[0]].storage
        way = _way(op_nodes[index], values_of, values, storages, index, last_reader)
        if way is None or storages[made].producer != index:
            continue
        ways[index] = way
        operand = op_nodes[index].args[way.operand]
        assert isinstance(operand, fx.Node)
        kept = values[values_of[operand][0]].storage
        _merge(values, storages, looking, made, kept)
        last_reader[kept] = last_reader.get(made, index)
    return ways


def _way(
    node: fx.Node,
    values_of: Mapping[fx.Node, tuple[int, ...]],
    values: Sequence[Value],
    storages: Sequence[Storage],
    index: int,
    last_reader: Mapping[int, int],
) -> InPlace | None:
    form, keyword, operands = _FORMS[node.target]
    tensors = [a for a in node.args[:2] if isinstance(a, fx.Node) and values_of.get(a)]
    for position in operands:
        operand = node.args[position]
        if not isinstance(operand, fx.Node) or not values_of.get(operand) or not _same_layout(operand, node):
            continue
        if position and node.kwargs:
            continue  # add with alpha scales its second operand: the two cannot change places
        storage_index = values[values_of[operand][0]].storage
        storage = storages[storage_index]
        others = [values[values_of[t][0]].storage for t in tensors if t is not operand]
        is_free = (
            storage.producer is not None
            and storage.category == Category.TEMPORARY
            and not storage.held
            and last_reader.get(storage_index) == index
            and storage_index not in others
        )
        if is_free:
            return InPlace(form, keyword, position)
    return None


def _same_layout(operand: fx.Node, node: fx.Node) -> bool:
    """Return whether an operand fills its storage and looks like the result."""
    a, b = operand.meta.get("val"), node.meta.get("val")
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.dtype != b.dtype or [hint(s) for s in a.shape] != [hint(s) for s in b.shape]:
        return False
    if [hint(s) for s in a.stride()] != [hint(s) for s in b.stride()]:
        return False
    return hint(a.untyped_storage().nbytes()) == hint(a.numel()) * a.element_size() > 0


def _merge(values: list[Value], storages: list[Storage], looking: dict[int, list[int]], made: int, kept: int) -> None:
    for index in looking.pop(made):
        values[index] = replace(values[index], storage=kept)
        looking[kept].append(index)
    gone, stays = storages[made], storages[kept]
    storages[kept] = replace(stays, held=gone.held, category=gone.category)
    storages[made] = replace(gone, size_bytes=0, producer=None, held=True, category=Category.TEMPORARY)
