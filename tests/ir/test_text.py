"""The text form says everything about a graph, and bad text names its line."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.graphs import ALL, REPEATING
from tests.strategies import training_graphs
from torchecho.errors import GraphError
from torchecho.ir.graph import Category, Op, Phase, Storage, TrainingGraph, Value
from torchecho.ir.text import format_graph, parse_graph

TEXT = """graph "step" base=7
storage 0 "x" 1024 input producer=- held
storage 1 "y" 512 activation producer=0
value 0 "x" storage=0 shape=4x64 dtype="float32"
value 1 "y" storage=1 shape=- dtype="float32"
op 0 "tanh" "aten.tanh.default" forward reads=0 writes=1 keep_reason="says \\"no\\"" source="m.py:4" flops=5 workspace=6
op 1 "alias" "aten.view.default" forward reads=1 writes=- view
"""
GRAPH = TrainingGraph(
    ops=(
        Op(
            "tanh",
            "aten.tanh.default",
            Phase.FORWARD,
            (0,),
            (1,),
            keep_reason='says "no"',
            source="m.py:4",
            flops=5,
            workspace_bytes=6,
        ),
        Op("alias", "aten.view.default", Phase.FORWARD, (1,), (), is_view=True),
    ),
    values=(Value("x", 0, (4, 64), "float32"), Value("y", 1, (), "float32")),
    storages=(
        Storage("x", 1024, Category.INPUT, None, held=True),
        Storage("y", 512, Category.ACTIVATION, 0, held=False),
    ),
    base_bytes=7,
)


def test_text_of_a_graph_by_hand():
    assert format_graph(GRAPH) == TEXT


def test_graph_of_a_text_by_hand():
    assert parse_graph(TEXT) == GRAPH


def test_what_a_recorded_step_adds_survives_the_round_trip():
    recorded = dataclasses.replace(GRAPH, forward_is_fixed=True, clock=(-9, -3))
    text = format_graph(recorded)
    assert text.splitlines()[0] == 'graph "step" base=7 fixed'
    assert text.splitlines()[-1].endswith("view clock=-3")
    assert parse_graph(text) == recorded


def test_clock_of_some_ops_only_is_refused():
    with pytest.raises(GraphError, match="1 of 2 ops have a clock"):
        parse_graph(TEXT.replace("flops=5", "flops=5 clock=1"))


def test_empty_lines_and_comments_are_skipped():
    assert parse_graph("# a step\n\n" + TEXT.replace("\n", "\n\n")) == GRAPH


@pytest.mark.parametrize("name", ALL | REPEATING)
def test_tiny_graphs_survive_the_round_trip(name):
    graph = (ALL | REPEATING)[name]().graph
    assert parse_graph(format_graph(graph)) == graph


@given(training_graphs() | training_graphs(repeats=True), st.text())
def test_any_graph_survives_the_round_trip(made, text):
    graph, _ = made
    op = Op(text, text, Phase.BACKWARD, (0,), (), module=text, signature=text)
    graph = TrainingGraph((*graph.ops, op), graph.values, graph.storages, graph.base_bytes, text)
    assert parse_graph(format_graph(graph)) == graph


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("storage 1", "storage 5", r"line 3.*number 5 stands where 1 is next"),
        ("value 0", "thing 0", r"line 4.*unknown item .*'thing'"),
        ("input", "imput", r"line 2.*'imput' is not a valid Category"),
        ("512", "many", r"line 3.*invalid literal"),
        (" shape=4x64", "", r"line 4.*shape= is missing"),
        (" held", " kept", r"line 2.*unknown word 'kept'"),
        (" flops=5", " flop=5", r"line 6.*unknown fact 'flop'"),
        ('"tanh"', '"tanh', r"line 6.*"),
        ('op 0 "tanh" "aten.tanh.default" forward reads=0 writes=1 ', "op 0 ", r"line 6.*word 3 is missing"),
    ],
)
def test_bad_text_names_the_line_and_the_reason(old, new, message):
    with pytest.raises(GraphError, match=message):
        parse_graph(TEXT.replace(old, new, 1))
