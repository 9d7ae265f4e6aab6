import dataclasses

import pytest

from tests.graphs import changed_in_place
from torchecho.cost.device import DeviceSpec
from torchecho.cost.model import OpCosts, estimate
from torchecho.cost.roofline import Roofline, op_traffic_bytes
from torchecho.ir.graph import Category, Op, Phase, Storage, TrainingGraph, Value

# 1000 flop/s (half precision 4000), 100 B/s, 1 s a launch: all expected values can be counted in the head.
SLOW = DeviceSpec("slow", 1000.0, 100.0, 1.0, 4000.0)


def graph_of(op: Op, shapes: list[tuple[int, ...]], dtype: str, sizes: list[int]) -> TrainingGraph:
    storages = tuple(
        Storage(f"s{i}", size, Category.ACTIVATION, 0 if i == len(sizes) - 1 else None, False)
        for i, size in enumerate(sizes)
    )
    values = tuple(Value(f"v{i}", i, shape, dtype) for i, shape in enumerate(shapes))
    return TrainingGraph((op,), values, storages)


def op_of(reads: tuple[int, ...], writes: tuple[int, ...], flops: int = 0, is_view: bool = False) -> Op:
    return Op("op", "aten.op", Phase.FORWARD, reads, writes, is_view=is_view, flops=flops)


@pytest.mark.parametrize(
    ("dtype", "flops", "seconds"),
    [
        ("float32", 0, 1 + 300 / 100),  # reads 200 B, writes 100 B
        ("torch.float32", 5000, 1 + 5000 / 1000),
        ("bfloat16", 8000, 1 + 8000 / 4000),
        ("float32", 1000, 1 + 3.0),  # 1 s of arithmetic hides behind 3 s of traffic
    ],
)
def test_longer_of_arithmetic_and_traffic(dtype, flops, seconds):
    item = 2 if dtype == "bfloat16" else 4
    graph = graph_of(op_of((0, 1), (2,), flops), [(5, 5)] * 3, dtype, [25 * item] * 3)
    assert Roofline(SLOW).op_seconds(graph.ops[0], graph) == pytest.approx(seconds)


def test_view_costs_nothing():
    graph = graph_of(op_of((0,), (1,), is_view=True), [(25,)] * 2, "float32", [100] * 2)
    assert estimate(graph, Roofline(SLOW)) == OpCosts((0.0,), (0,))


def test_workspace_is_what_is_known_of_the_op():
    op = dataclasses.replace(op_of((0,), (1,)), workspace_bytes=64)
    graph = graph_of(op, [(25,)] * 2, "float32", [100] * 2)
    assert Roofline(SLOW).op_workspace_bytes(graph.ops[0], graph) == 64


def test_op_that_repeats_others_costs_what_they_do_together():
    class Fixed:
        def op_seconds(self, op, graph):
            return float(len(op.name))

        def op_workspace_bytes(self, op, graph):
            return 10 * len(op.name)

    costs = estimate(changed_in_place().graph, Fixed())
    assert costs.seconds[:4] == (1.0, 1.0, 2.0, 3.0)
    assert costs.workspace_bytes[:4] == (10, 10, 20, 20)


def test_value_read_twice_is_moved_once():
    graph = graph_of(op_of((0, 0), (1,)), [(25,)] * 2, "float32", [100] * 2)
    assert op_traffic_bytes(graph.ops[0], graph) == 200


def test_expanded_value_has_no_more_bytes_than_its_storage():
    graph = graph_of(op_of((0,), (1,)), [(25, 10), (25, 10)], "float32", [40, 1000])
    assert op_traffic_bytes(graph.ops[0], graph) == 1040


@pytest.mark.parametrize(
    ("dtype", "item"),
    [("bool", 1), ("int64", 8), ("uint8", 1), ("float64", 8), ("complex64", 8), ("float8_e4m3fn", 1), ("float16", 2)],
)
def test_bytes_of_a_dtype(dtype, item):
    graph = graph_of(op_of((), (0,)), [(10,)], dtype, [1000])
    assert op_traffic_bytes(graph.ops[0], graph) == 10 * item


def test_dtype_of_unknown_size_counts_its_storage():
    graph = graph_of(op_of((), (0,)), [(10,)], "token", [1000])
    assert op_traffic_bytes(graph.ops[0], graph) == 1000


def test_a_copy_costs_what_its_engine_spends_on_each_call_too():
    graph = changed_in_place().graph
    costs = dataclasses.replace(estimate(graph, Roofline(SLOW)), recipe_seconds=0.5)
    for index, op in enumerate(graph.ops):  # the engine runs each of the repeated calls
        assert costs.copy_seconds(graph, index) == costs.seconds[index] + 0.5 * max(len(op.repeats), 1)
    view = graph_of(op_of((0,), (1,), is_view=True), [(25,)] * 2, "float32", [100] * 2)
    assert OpCosts((0.0,), (0,), recipe_seconds=0.5).copy_seconds(view, 0) == 0.0
