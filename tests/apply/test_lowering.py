"""The eager lowering: op by op, in order, every value freed after its last use."""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, fx

from torchecho.apply.lowering import lower_eager
from torchecho.meter.probe import PeakProbe, probe_available


def chain(length: int) -> fx.GraphModule:
    """Return a graph that takes a tensor through `length` exponentials."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    for _ in range(length):
        node = graph.call_function(torch.exp, (node,))
    graph.output((node,))
    return fx.GraphModule({}, graph)


def test_inputs_come_as_a_list_that_is_emptied() -> None:
    run = lower_eager(chain(1), [])
    inputs: list[Any] = [torch.zeros(3)]
    (made,) = run(inputs)
    assert torch.equal(made, torch.ones(3))
    assert inputs == []
    assert run._boxed_call is True  # type: ignore[attr-defined] # what AOTAutograd asks for


def test_an_input_dies_after_its_last_use() -> None:
    alive: list[bool] = []

    def look(_: Tensor) -> Tensor:
        gc.collect()
        alive.append(seen() is not None)
        return torch.zeros(1)

    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.exp, (x,))
    second = graph.call_function(look, (first,))
    graph.output((second,))
    inputs = [torch.zeros(3)]
    seen = weakref.ref(inputs[0])
    lower_eager(fx.GraphModule({"look": look}, graph), [])(inputs)
    assert alive == [False]


def test_values_die_after_their_last_use() -> None:
    assert probe_available("cpu")  # counts what is born from here on
    run = lower_eager(chain(6), [])
    inputs = [torch.zeros(1000)]
    with PeakProbe("cpu") as probe:
        run(inputs)
        # the input dies with its exponential; from then on two values of 4000 bytes lie there at once, of which one is
        # the input's place, counted before the start
        assert probe.read() == 4000


def test_the_order_of_the_graph_is_the_order_of_the_calls() -> None:
    order: list[str] = []

    def note(name: str) -> Tensor:
        order.append(name)
        return torch.zeros(1)

    graph = fx.Graph()
    nodes = [graph.call_function(note, (name,)) for name in ("c", "a", "b")]
    graph.output(tuple(nodes))
    lower_eager(fx.GraphModule({}, graph), [])([])
    assert order == ["c", "a", "b"]
