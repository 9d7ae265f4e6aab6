"""Capture AOTAutograd's joint forward and backward graph as a `TrainingGraph`.

Relies on what PyTorch's own partitioner relies on: placeholders named ``primals_*`` and ``tangents_*``, a flat output
with the forward outputs first, and `meta["val"]` fake tensors whose storages alias exactly where the real ones do.

Not modelled: storages of opaque objects, and of sparse or otherwise storage-less tensors (counted as 0 bytes).
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import classify_nodes  # the phases: same signature from torch 2.11 to 2.15

from torchecho.capture.describe import flops, hint, module_path, signature, source_line, tensors, workspace_bytes
from torchecho.capture.in_place import InPlace, find_in_place
from torchecho.capture.rules import keep_reason
from torchecho.errors import CaptureError
from torchecho.ir.graph import Category, Op, Phase, Storage, TrainingGraph, Value


@dataclass(frozen=True)
class JointCapture:
    """A training graph and the way back to the nodes that it was made of.

    Attributes:
        op_nodes: The node of each op.
        value_nodes: The node of each value; a tuple element that nothing reads has the node of its tuple.
        num_forward_outputs: How many outputs of the joint graph are the forward's.
        in_place: How the ops that write over an operand are called, by op.
    """

    graph: TrainingGraph
    module: fx.GraphModule
    op_nodes: tuple[fx.Node, ...]
    value_nodes: tuple[fx.Node, ...]
    storage_of: dict[fx.Node, tuple[int, ...]]
    num_forward_outputs: int
    static_nodes: tuple[fx.Node, ...]
    in_place: Mapping[int, InPlace]


@dataclass
class _Builder:
    """The lists of a graph while its nodes are walked."""

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    op_nodes: list[fx.Node] = field(default_factory=list)
    value_nodes: list[fx.Node] = field(default_factory=list)
    values_of: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    index_of_storage: dict[int, int] = field(default_factory=dict)

    def add_value(self, node: fx.Node, name: str, tensor: torch.Tensor, storage: int) -> int:
        shape = tuple(hint(size) for size in tensor.shape)
        self.values.append(Value(name, storage, shape, str(tensor.dtype).removeprefix("torch.")))
        self.value_nodes.append(node)
        return len(self.values) - 1

    def storage(self, tensor: torch.Tensor, name: str, category: Category, producer: int | None) -> tuple[int, bool]:
        """Return the storage index of a tensor, and whether this call made it."""
        key, size_bytes = _storage_key(tensor)
        if key in self.index_of_storage:
            return self.index_of_storage[key], False
        self.index_of_storage[key] = len(self.storages)
        # Whoever calls backward() on a loss holds its gradient, one number, until the backward has ended.
        held = producer is None and (category != Category.TANGENT or hint(tensor.numel()) == 1)
        self.storages.append(Storage(name, size_bytes, category, producer, held))
        return len(self.storages) - 1, True


def capture_joint(
    module: fx.GraphModule,
    *,
    num_forward_outputs: int,
    static_indices: Sequence[int] | None = None,
    base_bytes: int = 0,
    model_bytes: int = 0,
    in_place: bool = False,
) -> JointCapture:
    """Turn a joint graph module into a training graph.

    Args:
        module: Joint graph with `meta["val"]` on every node; dead nodes are removed from it.
        num_forward_outputs: How many of its outputs belong to the forward phase.
        static_indices: Which primals are parameters or buffers.
        base_bytes: Bytes alive throughout the step that the graph does not hold.
        model_bytes: Bytes of all parameters and buffers of the model; those that this graph does not hold are added.
        in_place: Let backward ops write over operands that nobody reads any more; for lowerings that run ops as they
            are.

    Raises:
        CaptureError: the graph holds something that is not a call, a placeholder, an attribute or the output.
    """
    module.graph.eliminate_dead_code()
    _check_kinds(module.graph)
    info = classify_nodes(module, list(static_indices or []), num_forward_outputs)
    phases = _phases(module.graph, info)
    static = tuple(info.static_lifetime_input_nodes)
    builder = _Builder()
    trained = _trained_primals(module.graph, num_forward_outputs)
    for node in module.graph.nodes:
        _add_node(builder, node, phases, static, trained)
    _forbid_changed_inputs(builder, module.graph)
    _mark_outputs(builder, module.graph, num_forward_outputs)
    ways: Mapping[int, InPlace] = {}
    if in_place:
        ways = find_in_place(builder.ops, builder.values, builder.storages, builder.op_nodes, builder.values_of)
    own_bytes = sum(s.size_bytes for s in builder.storages if s.category in (Category.PARAMETER, Category.BUFFER))
    base_bytes += max(model_bytes - own_bytes, 0)
    graph = TrainingGraph(tuple(builder.ops), tuple(builder.values), tuple(builder.storages), base_bytes)
    storage_of = {n: tuple(builder.values[v].storage for v in vs) for n, vs in builder.values_of.items()}
    return JointCapture(
        graph,
        module,
        tuple(builder.op_nodes),
        tuple(builder.value_nodes),
        storage_of,
        num_forward_outputs,
        static,
        ways,
    )


def gradient_outputs(graph: fx.Graph, num_forward_outputs: int) -> list[fx.Node | None]:
    """Return the outputs of a joint graph that stand after the forward's: one a primal, None where it has none."""
    return list(graph.find_nodes(op="output")[0].args[0][num_forward_outputs:])


def _check_kinds(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            raise CaptureError(f"joint graph node {node.name} is a {node.op}: only functions can be captured")


def _phases(graph: fx.Graph, info: Any) -> dict[fx.Node, Phase]:
    """Return the phase of every call: by data flow, and by tag or position for what neither phase claims."""
    forward, backward = frozenset(info.required_fw_nodes), frozenset(info.required_bw_nodes)
    phases: dict[fx.Node, Phase] = {}
    unclaimed: list[fx.Node] = []
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        if node in forward:
            phases.update(dict.fromkeys([*unclaimed, node], Phase.FORWARD))
            unclaimed.clear()
        elif node in backward or _tag(node) == "backward":
            phases[node] = Phase.BACKWARD
        elif _tag(node) == "forward":
            phases[node] = Phase.FORWARD
        else:
            unclaimed.append(node)  # forward when a forward node follows, else backward
    phases.update(dict.fromkeys(unclaimed, Phase.BACKWARD))
    return phases


def _tag(node: fx.Node) -> str:
    return str(node.meta.get("partitioner_tag", "")).rsplit("_", 1)[-1]


def _trained_primals(graph: fx.Graph, num_forward_outputs: int) -> frozenset[fx.Node]:
    """Return the primals that get a gradient: the backward outputs stand in the order of the primals."""
    primals = [n for n in graph.find_nodes(op="placeholder") if str(n.target).startswith("primals")]
    gradients = gradient_outputs(graph, num_forward_outputs)
    return frozenset(p for p, g in zip(primals, gradients, strict=False) if g is not None)


def _add_node(
    builder: _Builder,
    node: fx.Node,
    phases: dict[fx.Node, Phase],
    static: tuple[fx.Node, ...],
    trained: frozenset[fx.Node],
) -> None:
    if node.op == "placeholder":
        _add_sources(builder, node, _category(node, static, trained))
    elif node.op == "get_attr":
        _add_constant(builder, node)
    elif node.op == "call_function" and node.target is operator.getitem and _picks_element(builder, node):
        return
    elif node.op == "call_function":
        _add_call(builder, node, phases[node])


def _category(node: fx.Node, static: tuple[fx.Node, ...], trained: frozenset[fx.Node]) -> Category:
    if "tangents" in str(node.target):
        return Category.TANGENT
    if node in static:
        return Category.PARAMETER if node in trained else Category.BUFFER
    return Category.INPUT


def _add_constant(builder: _Builder, node: fx.Node) -> None:
    _add_sources(builder, node, Category.BUFFER)


def _add_sources(builder: _Builder, node: fx.Node, category: Category) -> None:
    made = []
    for tensor in tensors(node.meta.get("val")):
        storage, _ = builder.storage(tensor, node.name, category, None)
        made.append(builder.add_value(node, node.name, tensor, storage))
    builder.values_of[node] = tuple(made)


def _picks_element(builder: _Builder, node: fx.Node) -> bool:
    """Point a ``getitem`` of a tuple at the element's value; return False when it is some other subscript."""
    whole, index = node.args
    if not isinstance(whole, fx.Node) or not isinstance(whole.meta.get("val"), (tuple, list)):
        return False
    values, items = builder.values_of.get(whole, ()), whole.meta["val"]
    begin = sum(1 for _ in tensors(items[:index]))
    own = values[begin : begin + sum(1 for _ in tensors(items[index]))]  # several where the element is a list itself
    builder.values_of[node] = own
    if own and isinstance(items[index], torch.Tensor):
        builder.value_nodes[own[0]] = node
    return True


def _add_call(builder: _Builder, node: fx.Node, phase: Phase) -> None:
    index = len(builder.ops)
    category = Category.ACTIVATION if phase == Phase.FORWARD else Category.TEMPORARY
    writes, allocates = [], False
    for tensor in tensors(node.meta.get("val")):
        storage, made = builder.storage(tensor, node.name, category, index)
        allocates = allocates or made
        writes.append(builder.add_value(node, node.name, tensor, storage))
    reads = tuple(dict.fromkeys(v for a in node.all_input_nodes for v in builder.values_of.get(a, ())))
    mutable = bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))
    is_view = not allocates and not mutable and _is_free(node)
    reason = "" if is_view else keep_reason(node)
    builder.ops.append(
        Op(
            name=node.name,
            target=str(node.target),
            phase=phase,
            reads=reads,
            writes=tuple(writes),
            is_view=is_view,
            keep_reason=reason,
            module=module_path(node),
            source=source_line(node),
            signature="" if is_view else signature(node),
            flops=0 if is_view else flops(node),
            workspace_bytes=0 if is_view else workspace_bytes(node),
        )
    )
    builder.op_nodes.append(node)
    builder.values_of[node] = tuple(writes)


def _is_free(node: fx.Node) -> bool:
    """Return whether a node that allocates nothing may be rebuilt for nothing: a view, a size, arithmetic on sizes."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in ("aten", "prims", "prim")
    return not isinstance(node.target, torch._ops.HigherOrderOperator)


def _storage_key(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return id(tensor), 0
    storage = tensor.untyped_storage()
    return storage._cdata, hint(storage.nbytes())


def _forbid_changed_inputs(builder: _Builder, graph: fx.Graph) -> None:
    """Keep whatever reads an input that the forward later changes in place: a second run would read the new value."""
    changed = _changed_storages(builder, graph)
    if not changed:
        return
    for index, op in enumerate(builder.ops):
        touches = any(builder.values[v].storage in changed for v in op.reads)
        if touches and not op.is_view and not op.keep_reason and op.phase == Phase.FORWARD:
            builder.ops[index] = replace(op, keep_reason="reads an input that the forward changes in place")


def _changed_storages(builder: _Builder, graph: fx.Graph) -> set[int]:
    changed: set[int] = set()
    primals = {n.name: n for n in graph.find_nodes(op="placeholder")}
    ordered = [n for n in primals.values() if str(n.target).startswith("primals")]
    by_descriptor = {str(n.meta.get("desc")): n for n in ordered}
    for node in graph.nodes:
        for argument in _written_arguments(node):
            changed.update(builder.values[v].storage for v in builder.values_of.get(argument, ()))
    output = graph.find_nodes(op="output")[0]
    for descriptor in output.meta.get("desc", ()):
        mutated = getattr(descriptor, "mutated_input", None)
        if mutated is not None and str(mutated) in by_descriptor:
            changed.update(builder.values[v].storage for v in builder.values_of[by_descriptor[str(mutated)]])
    return changed


def _written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, fx.Node):
            yield given


def _mark_outputs(builder: _Builder, graph: fx.Graph, num_forward_outputs: int) -> None:
    """Mark the storages that the caller holds once they exist: forward outputs and gradients."""
    outputs = graph.find_nodes(op="output")[0].args[0]
    assert isinstance(outputs, Iterable)
    for position, node in enumerate(outputs):
        if not isinstance(node, fx.Node):
            continue
        category = Category.OUTPUT if position < num_forward_outputs else Category.GRADIENT
        for value in builder.values_of.get(node, ()):
            _hold(builder, builder.values[value].storage, category)


def _hold(builder: _Builder, index: int, category: Category) -> None:
    storage = builder.storages[index]
    if storage.producer is None:
        return
    builder.storages[index] = Storage(storage.name, storage.size_bytes, category, storage.producer, True)
