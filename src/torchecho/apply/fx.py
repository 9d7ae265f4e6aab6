"""Turn a schedule into a forward and a backward graph module, with as many copies of an op as the schedule holds.

PyTorch's own extraction makes both modules from the set of saved values, so that every contract of AOTAutograd (order
of saved tensors, sizes first, version checks, tangents, seeds, None gradients) is kept by the code that defines it.
Only the body of the backward graph is then written anew, op by op in the order of the schedule.

Relies on ``torch._functorch.partitioners._extract_fwd_bwd_modules`` (torch 2.11 to 2.15, keyword arguments unchanged).
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch.utils._ordered_set import OrderedSet  # private: the type that the extraction takes

from torchecho.capture.fx import JointCapture, gradient_outputs
from torchecho.capture.in_place import in_place_call
from torchecho.errors import ApplyError
from torchecho.ir.graph import Phase
from torchecho.ir.schedule import Schedule


def apply_schedule(capture: JointCapture, schedule: Schedule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and backward modules that run a schedule of a captured joint graph.

    Raises:
        ApplyError: the forward module does not run the forward steps of the schedule, or a step needs a value that
            is neither saved nor made before it.
    """
    stashed = stashed_storages(capture, schedule)
    _check_stashed(capture, stashed)
    saved = {storage: _base_nodes(capture, storage) for storage in stashed}
    _carry_version_check_marks(capture, saved)
    module = capture.module
    forward, backward = _extract_fwd_bwd_modules(
        module,
        [node for nodes in saved.values() for node in nodes],
        saved_sym_nodes=_size_nodes(module.graph),
        num_fwd_outputs=capture.num_forward_outputs,
        static_lifetime_input_nodes=OrderedSet(capture.static_nodes),
    )
    _check_forward(capture, schedule, forward)
    return forward, fx.GraphModule(module, _BackwardWriter(capture, backward.graph).write(schedule))


def stashed_storages(capture: JointCapture, schedule: Schedule) -> tuple[int, ...]:
    """Return the storages that cross from forward to backward in a schedule, sources included, in order of storage."""
    graph = capture.graph
    fresh: set[int] = set()
    crossing: set[int] = set()
    for index in schedule.backward:
        reads = graph.read_storages[index]
        crossing.update(s for s in reads if s not in fresh and not _is_tangent(capture, s))
        fresh.update(graph.allocated_storages[index])
    crossing.update(s for s in _handed_out(capture) if s not in fresh and not _is_tangent(capture, s))
    return tuple(s for s in sorted(crossing) if _base_nodes(capture, s)[0].op != "get_attr")


def _check_stashed(capture: JointCapture, stashed: tuple[int, ...]) -> None:
    for index in stashed:
        storage = capture.graph.storages[index]
        if storage.producer is not None and capture.graph.ops[storage.producer].phase == Phase.BACKWARD:
            raise ApplyError(f"{storage.name} is needed in the backward phase before the schedule makes it")


def _handed_out(capture: JointCapture) -> Iterable[int]:
    """Yield the storages of the gradients: one may be a forward value or a saved input as it is."""
    for node in gradient_outputs(capture.module.graph, capture.num_forward_outputs):
        if isinstance(node, fx.Node):
            yield from capture.storage_of[node]


def _is_tangent(capture: JointCapture, storage: int) -> bool:
    return capture.graph.storages[storage].category == "tangent"


def _base_nodes(capture: JointCapture, storage: int) -> list[fx.Node]:
    """Return the nodes that stand for a whole storage: what its producer writes, or its placeholders.

    Inputs of the graph can share a storage, as the weights of a recurrent layer do that cuDNN has laid side by side;
    none of them can be made from another. Those that the backward does not read the extraction drops.
    """
    producer = capture.graph.storages[storage].producer
    if producer is not None:
        written = capture.graph.ops[producer].writes
        return [next(capture.value_nodes[v] for v in written if capture.graph.values[v].storage == storage)]
    nodes = zip(capture.graph.values, capture.value_nodes, strict=True)
    own = [node for value, node in nodes if value.storage == storage]
    return [node for node in own if node.op == own[0].op]


def _carry_version_check_marks(capture: JointCapture, saved: Mapping[int, list[fx.Node]]) -> None:
    """Let a storage go unchecked where autograd stashed any view of it without a version check."""
    marked = {
        storage
        for node, storages in capture.storage_of.items()
        if node.meta.get("saved_tensor_with_no_vc_check")
        for storage in storages
    }
    for storage, nodes in saved.items():
        for node in nodes if storage in marked else ():
            node.meta["saved_tensor_with_no_vc_check"] = True


def _size_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that hold a size and do not depend on a tangent: cheap to save, needed to rebuild views."""
    late: set[fx.Node] = set()
    sizes = []
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(argument in late for argument in node.all_input_nodes):
            late.add(node)
        elif node.op != "output" and isinstance(node.meta.get("val"), torch.SymInt):
            sizes.append(node)
    return sizes


def _check_forward(capture: JointCapture, schedule: Schedule, forward: fx.GraphModule) -> None:
    kernels = {capture.op_nodes[i].name for i in capture.graph.kernels}
    runs = [n.name for n in forward.graph.nodes if n.name in kernels]
    wanted = [capture.op_nodes[i].name for i in schedule.forward]
    if runs != wanted:
        odd = sorted(set(runs) ^ set(wanted))[:3]
        raise ApplyError(
            f"the forward module runs {len(runs)} ops where the schedule has {len(wanted)} (first difference: {odd})"
        )


@dataclass
class _BackwardWriter:
    """Writes the body of a backward graph step by step; `newest` holds the newest copy of every joint node."""

    capture: JointCapture
    extracted: fx.Graph
    graph: fx.Graph = field(default_factory=fx.Graph)
    newest: dict[fx.Node, fx.Node] = field(default_factory=dict)
    copy_of_storage: dict[int, int] = field(default_factory=dict)
    seen_copy: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    op_index: dict[fx.Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self.op_index = {node: i for i, node in enumerate(self.capture.op_nodes)}

    def write(self, schedule: Schedule) -> fx.Graph:
        """Return the graph: placeholders as extracted, the backward steps, the gradients."""
        joint = {node.name: node for node in self.capture.module.graph.nodes}
        for placeholder in self.extracted.find_nodes(op="placeholder"):
            self._record(joint[placeholder.name], self.graph.node_copy(placeholder))
        for index in schedule.backward:
            self._write_op(self.capture.op_nodes[index], is_copy=self.capture.graph.ops[index].phase == Phase.FORWARD)
        output = self.extracted.find_nodes(op="output")[0]
        gradients = gradient_outputs(self.capture.module.graph, self.capture.num_forward_outputs)
        result = self.graph.output(type(output.args[0])(self._resolve_all(gradients)))
        result.meta = dict(output.meta)
        return self.graph

    def _write_op(self, node: fx.Node, *, is_copy: bool) -> None:
        for storage in self.capture.graph.allocated_storages[self.op_index[node]]:
            self.copy_of_storage[storage] = self.copy_of_storage.get(storage, 0) + 1
        self._record(node, self._copy(node, is_copy=is_copy))
        if isinstance(node.meta.get("val"), (tuple, list)):
            for user in node.users:
                if user.target is operator.getitem:
                    self._record(user, self._copy(user, is_copy=is_copy))

    def _copy(self, node: fx.Node, *, is_copy: bool) -> fx.Node:
        way = self.capture.in_place.get(self.op_index.get(node, -1))
        target, given = (node.target, (node.args, node.kwargs)) if way is None else (way.form, in_place_call(node, way))
        args, kwargs = self._resolve_all(given)
        name = f"{node.name}_recomputed" if is_copy else node.name
        copy = self.graph.create_node(node.op, target, args, kwargs, name=name)
        copy.meta = dict(node.meta)
        copy.meta["autograd_backward"] = True
        if node in self.newest:
            copy.meta["val"] = _own_fake(node.meta.get("val"))
        return copy

    def _record(self, node: fx.Node, copy: fx.Node) -> None:
        self.newest[node] = copy
        self.seen_copy[node] = self._copy_numbers(node)

    def _copy_numbers(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(self.copy_of_storage.get(s, 0) for s in self.capture.storage_of.get(node, ()))

    def _resolve_all(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, self._resolve)

    def _resolve(self, node: fx.Node) -> fx.Node:
        """Return the newest copy of a node; a view of a storage that has a newer copy is rebuilt from it."""
        if node in self.newest and self.seen_copy[node] == self._copy_numbers(node):
            return self.newest[node]
        if node.op == "get_attr":
            self._record(node, self.graph.node_copy(node))
            return self.newest[node]
        is_element = node.target is operator.getitem  # of a tuple of views: those of other tuples come with their op
        index = self.op_index.get(node)
        if not is_element and (index is None or not self.capture.graph.ops[index].is_view):
            raise ApplyError(f"{node.name} is needed in the backward phase but is neither saved nor recomputed before")
        is_copy = index is not None and self.capture.graph.ops[index].phase == Phase.FORWARD
        self._record(node, self._copy(node, is_copy=is_copy))
        return self.newest[node]


def _own_fake(value: Any) -> Any:
    """Return fresh fake tensors like `value`: copies that share one would look like aliases to storage analyses."""
    if isinstance(value, (tuple, list)):
        return type(value)(_own_fake(item) for item in value)
    if not isinstance(value, torch._subclasses.FakeTensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
