"""What a joint graph becomes: storages behind views, phases, categories, what the caller holds, bytes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from tests.capture.joint import capture
from tests.end_to_end.models import Square
from tests.verify import verify_graph
from torchecho.capture.fx import JointCapture, capture_joint
from torchecho.errors import CaptureError
from torchecho.ir.graph import Category, Op, Phase, Storage


def leaf(*shape: int) -> Tensor:
    """Return an input that wants a gradient."""
    return torch.randn(*shape, requires_grad=True)


def op_named(captured: JointCapture, target: str, place: int = 0) -> Op:
    """Return an op by what it calls, such as ``tanh``."""
    return [op for op in captured.graph.ops if f".{target}." in op.target][place]


def storage_of(captured: JointCapture, op: Op, output: int = 0) -> int:
    """Return the storage of an output of an op."""
    return captured.graph.values[op.writes[output]].storage


def sizes(captured: JointCapture, category: Category) -> list[int]:
    """Return the bytes of the storages of a category, in order."""
    return [s.size_bytes for s in captured.graph.storages if s.category == category]


def storage_named(captured: JointCapture, name: str) -> Storage:
    """Return a storage by its name."""
    return next(s for s in captured.graph.storages if s.name == name)


VIEWS = {
    "view": lambda y: y.view(2, 8),
    "transpose": lambda y: y.t(),
    "slice": lambda y: y[1:3, ::2],
    "select": lambda y: y[1],
    "expand": lambda y: y[:, :1].expand(4, 6),
    "overlapping": lambda y: torch.as_strided(y, (3, 4), (1, 1)),
    "a view of a view of a view": lambda y: y.view(2, 8).t()[1:3].unsqueeze(0),
    "an element of split": lambda y: y.split(2, 1)[1],
    "an element of chunk": lambda y: y.chunk(2)[0],
    "an element of unbind": lambda y: y.unbind(1)[3],
    "unfold": lambda y: y.unfold(0, 2, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_shares_the_storage_it_looks_at(name: str) -> None:
    captured = capture(lambda x: VIEWS[name](torch.tanh(x)).exp().sum(), leaf(4, 4))
    behind = storage_of(captured, op_named(captured, "tanh"))
    (read,) = op_named(captured, "exp").reads
    value = captured.graph.values[read]
    assert value.storage == behind
    assert captured.graph.storages[behind].size_bytes == 4 * 4 * 4
    assert value.shape == tuple(VIEWS[name](torch.zeros(4, 4)).shape)
    forward = [op for op in captured.graph.ops if op.phase == Phase.FORWARD]
    assert [op.target.split(".")[1] for op in forward if not op.is_view] == ["tanh", "exp", "sum"]
    verify_graph(captured.graph)


def test_each_element_of_a_split_is_its_own_value() -> None:
    captured = capture(lambda x: torch.tanh(x).split([1, 3], 1)[1].exp().sum(), leaf(4, 4))
    split, exp = op_named(captured, "split_with_sizes"), op_named(captured, "exp")
    assert [captured.graph.values[v].shape for v in split.writes] == [(4, 1), (4, 3)]
    assert exp.reads == (split.writes[1],)


def test_an_output_that_nobody_reads_has_bytes_and_no_readers() -> None:
    captured = capture(lambda x: torch.var_mean(x, 1)[1].exp().sum(), leaf(4, 8))
    op = op_named(captured, "var_mean")
    unused = storage_of(captured, op, 0)
    assert captured.graph.storages[unused].size_bytes == 4 * 4
    assert unused not in {s for reads in captured.graph.read_storages for s in reads}
    assert op_named(captured, "exp").reads == (op.writes[1],)


def test_the_element_that_a_getitem_picks_is_what_its_users_read() -> None:
    captured = capture(lambda x: F.max_pool2d(x, 2).exp().sum(), leaf(1, 1, 4, 4))
    pool, backward = (
        op_named(captured, "max_pool2d_with_indices"),
        op_named(captured, "max_pool2d_with_indices_backward"),
    )
    assert [captured.graph.values[v].dtype for v in pool.writes] == ["float32", "int64"]
    assert op_named(captured, "exp").reads == (pool.writes[0],)
    assert pool.writes[1] in backward.reads
    assert pool.writes[0] not in backward.reads
    assert captured.value_nodes[pool.writes[1]].target.__name__ == "getitem"


def test_what_a_custom_function_stashes_is_a_forward_value() -> None:
    captured = capture(lambda x: Square.apply(x * 2).sum(), leaf(3, 4))
    phases = [(op.target.split(".")[1], op.phase) for op in captured.graph.ops if not op.is_view]
    assert phases[:4] == [(name, Phase.FORWARD) for name in ("mul", "tanh", "mul", "sum")]
    # the derivative as written: grad * 2, * inner, inner * inner, 1 - that, their product, then that of x * 2
    assert phases[4:] == [(name, Phase.BACKWARD) for name in ("mul", "mul", "mul", "rsub", "mul", "mul")]


def test_the_phases_split_the_ops_as_autograd_does() -> None:
    captured = capture(lambda x: torch.tanh(x).sum(), leaf(3, 4))
    kernels = [captured.graph.ops[i] for i in captured.graph.kernels]
    assert [(op.target, op.phase) for op in kernels] == [
        ("aten.tanh.default", Phase.FORWARD),
        ("aten.sum.default", Phase.FORWARD),
        ("aten.tanh_backward.default", Phase.BACKWARD),
    ]


class Normed(nn.Module):
    """A frozen parameter, trained ones, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("shift", torch.ones(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 6) to (B, 5)."""
        return torch.tanh(x @ self.weight * self.frozen + self.shift)


def test_parameters_buffers_and_inputs_are_told_apart() -> None:
    captured = capture(Normed(), torch.randn(3, 6))
    assert sizes(captured, Category.PARAMETER) == [4 * 30]
    assert sorted(sizes(captured, Category.BUFFER)) == [20, 20]  # what is never trained behaves as a buffer does
    assert sizes(captured, Category.INPUT) == [4 * 18]
    sources = [s for s in captured.graph.storages if s.producer is None and s.category != Category.TANGENT]
    assert all(s.held for s in sources)
    assert captured.graph.fixed_bytes == 4 * (30 + 5 + 5 + 18)


def test_outputs_and_gradients_are_held_and_nothing_else_is() -> None:
    captured = capture(Normed(), torch.randn(3, 6))
    held = [(s.category, s.size_bytes) for s in captured.graph.storages if s.held and s.producer is not None]
    # the backward of @ writes the gradient of the weight, 6 x 5; frozen parameter and buffer get none
    assert held == [(Category.OUTPUT, 4 * 15), (Category.GRADIENT, 4 * 30)]


def test_the_storage_behind_a_returned_view_is_held() -> None:
    captured = capture(lambda x: torch.tanh(x)[1:], leaf(4, 4))
    tanh = storage_named(captured, "tanh")
    assert (tanh.category, tanh.held, tanh.size_bytes) == (Category.OUTPUT, True, 64)


def test_a_scalar_tangent_is_held_by_the_caller_and_a_tensor_is_not() -> None:
    scalar = storage_named(capture(lambda x: x.exp().sum(), leaf(4)), "tangents_1")
    torch.compiler.reset()
    tensor = storage_named(capture(lambda x: x.exp(), leaf(4)), "tangents_1")
    assert (scalar.category, scalar.size_bytes, scalar.held) == (Category.TANGENT, 4, True)
    assert (tensor.category, tensor.size_bytes, tensor.held) == (Category.TANGENT, 16, False)


def test_a_gradient_that_is_none_is_no_storage() -> None:
    captured = capture(Normed(), torch.randn(3, 6))
    outputs = captured.module.graph.find_nodes(op="output")[0].args[0]
    assert sum(node is None for node in outputs) == 3  # frozen, shift and x
    assert len(sizes(captured, Category.GRADIENT)) == 1


def test_zero_size_tensors_count_no_bytes() -> None:
    captured = capture(lambda x: (torch.zeros(0) * x.sum()).sum() + x.exp().sum(), leaf(3, 4))
    assert storage_named(captured, "zeros").size_bytes == 0
    assert storage_named(captured, "mul").size_bytes == 0


def test_sizes_are_those_of_the_dtype() -> None:
    captured = capture(lambda x: (x.to(torch.bfloat16) * 2).double().sum(), leaf(3, 4))
    activations = [s.size_bytes for s in captured.graph.storages if s.category == Category.ACTIVATION]
    assert activations == [2 * 12, 2 * 12, 8 * 12]


def test_a_symbolic_batch_counts_as_its_example() -> None:
    layer = nn.Linear(4, 4)
    captured = capture(lambda x: torch.tanh(layer(x).view(x.shape[0] * 2, 2)).sum(), torch.randn(6, 4), dynamic=True)
    assert any(isinstance(n.meta.get("val"), torch.SymInt) for n in captured.module.graph.nodes)
    tanh = op_named(captured, "tanh")
    assert captured.graph.values[tanh.writes[0]].shape == (12, 2)
    assert captured.graph.storages[storage_of(captured, tanh)].size_bytes == 4 * 24
    assert op_named(captured, "addmm").flops == 2 * 6 * 4 * 4
    assert "float32[12,2|2,1]" in tanh.signature


@pytest.mark.parametrize(
    ("model_bytes", "base_bytes", "expected"), [(0, 0, 0), (160, 7, 7), (1000, 7, 847), (100, 0, 0)]
)
def test_model_bytes_that_the_graph_does_not_hold_are_base(model_bytes: int, base_bytes: int, expected: int) -> None:
    # the graph holds 120 bytes of weight, 20 of the frozen parameter and 20 of the buffer
    captured = capture(Normed(), torch.randn(3, 6), model_bytes=model_bytes, base_bytes=base_bytes)
    assert captured.graph.base_bytes == expected
    assert captured.graph.fixed_bytes == expected + 160 + 72


def test_a_tensor_constant_is_a_buffer() -> None:
    captured = capture_joint(_by_hand(constant=True), num_forward_outputs=1)
    constant = storage_named(captured, "table")
    assert (constant.category, constant.size_bytes, constant.held) == (Category.BUFFER, 16, True)


def test_sparse_tensors_count_no_bytes() -> None:
    captured = capture_joint(_by_hand(sparse=True), num_forward_outputs=1)
    assert storage_named(captured, "primals_1").size_bytes == 0
    assert captured.graph.storages[storage_of(captured, op_named(captured, "sin"))].size_bytes == 16
    assert "float32[4,4|-]cpu" in op_named(captured, "mv").signature


def test_what_is_no_function_call_is_refused_by_name() -> None:
    module = _by_hand()
    node = next(n for n in module.graph.nodes if n.target is torch.ops.aten.sin.default)
    with module.graph.inserting_before(node):
        called = module.graph.call_method("cos", node.args)
    called.meta["val"] = node.meta["val"]
    node.args = (called,)
    with pytest.raises(CaptureError, match="cos is a call_method: only functions can be captured"):
        capture_joint(module, num_forward_outputs=1)


def _by_hand(*, constant: bool = False, sparse: bool = False) -> fx.GraphModule:
    """Write the joint graph of ``sin(matrix @ x)`` for x of four numbers; the matrix comes as asked."""
    mode, graph = FakeTensorMode(), fx.Graph()

    def node(made: fx.Node, value: Any) -> fx.Node:
        made.meta["val"] = mode.from_tensor(value)
        return made

    matrix = torch.eye(4).to_sparse() if sparse else torch.eye(4)
    first = node(graph.placeholder("primals_1"), matrix)
    x = node(graph.placeholder("primals_2"), torch.zeros(4))
    t = node(graph.placeholder("tangents_1"), torch.zeros(4))
    product = node(graph.call_function(torch.ops.aten.mv.default, (first, x)), torch.zeros(4))
    if constant:
        table = node(graph.get_attr("table"), torch.zeros(4))
        product = node(graph.call_function(torch.ops.aten.mul.Tensor, (product, table)), torch.zeros(4))
    y = node(graph.call_function(torch.ops.aten.sin.default, (product,)), torch.zeros(4))
    cos = node(graph.call_function(torch.ops.aten.cos.default, (product,)), torch.zeros(4))
    gradient = node(graph.call_function(torch.ops.aten.mul.Tensor, (t, cos)), torch.zeros(4))
    graph.output([y, None, gradient])
    return fx.GraphModule({"table": torch.zeros(4)}, graph)
