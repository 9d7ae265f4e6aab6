"""Graphs are checked, and the facts derived from them are right."""

from dataclasses import replace

import pytest
from hypothesis import given

from tests.graphs import ALL, REPEATING, chain, changed_in_place, unused_output, views
from tests.strategies import training_graphs
from tests.verify import verify_graph
from torchecho.errors import GraphError
from torchecho.ir.graph import Phase


@pytest.mark.parametrize("name", ALL | REPEATING)
def test_tiny_graphs_are_well_formed(name):
    verify_graph((ALL | REPEATING)[name]().graph)


@given(training_graphs() | training_graphs(repeats=True))
def test_random_graphs_are_well_formed(made):
    verify_graph(made[0])


def test_views_are_no_kernels_and_read_the_storage_behind():
    graph = views().graph
    assert [graph.ops[i].name for i in graph.kernels] == ["a", "loss", "g", "gx"]
    loss = next(i for i, op in enumerate(graph.ops) if op.name == "loss")
    assert [graph.storages[s].name for s in graph.read_storages[loss]] == ["a"]


def test_fixed_bytes_are_the_base_and_what_is_held_from_the_start():
    assert unused_output().graph.fixed_bytes == 1002


def test_allocated_storages_are_those_an_op_makes():
    graph = unused_output().graph
    assert [graph.storages[s].size_bytes for s in graph.allocated_storages[0]] == [6, 50]


def test_op_that_repeats_others_makes_what_they_make_and_is_no_kernel():
    graph = changed_in_place().graph
    assert [graph.ops[i].name for i in graph.kernels] == ["y", "z", "y_", "loss", "gl", "gx"]
    assert [graph.ops[i].name for i in graph.makers][:5] == ["y then y_", "z", "y then y_", "y then y_", "loss"]
    assert graph.allocated_storages[3] == graph.allocated_storages[0]


def _with_op(graph, index, **changes):
    ops = list(graph.ops)
    ops[index] = replace(ops[index], **changes)
    return replace(graph, ops=tuple(ops))


def _with_storage(graph, index, **changes):
    storages = list(graph.storages)
    storages[index] = replace(storages[index], **changes)
    return replace(graph, storages=tuple(storages))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda g: _with_op(g, 0, reads=(99,)), "reads value 99"),
        (lambda g: _with_op(g, 0, reads=(g.ops[1].writes[0],)), "before it is made"),
        (lambda g: _with_op(g, 5, phase=Phase.FORWARD), "made in the backward phase"),
        (lambda g: _with_storage(g, 1, size_bytes=-1), "-1 bytes"),
        (lambda g: _with_op(g, 0, is_view=True), "a view"),
        (lambda g: _with_storage(g, 2, producer=0), "not written by its producer"),
    ],
)
def test_a_damaged_graph_is_refused_with_the_reason(damage, message):
    with pytest.raises(GraphError, match=message):
        verify_graph(damage(chain().graph))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda g: _with_op(g, 3, repeats=(0, 5)), "repeats op 5: that is no earlier op of the forward"),
        (lambda g: _with_op(g, 4, repeats=(3,)), "repeats op 3: that is no earlier op of the forward"),
        (lambda g: replace(g, forward_is_fixed=False), "in a forward that is not fixed"),
    ],
)
def test_an_op_that_cannot_repeat_others_is_refused_with_the_reason(damage, message):
    with pytest.raises(GraphError, match=message):
        verify_graph(damage(changed_in_place().graph))
