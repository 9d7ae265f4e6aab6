"""Recurrent layers in Dynamo's graph: one operator for each layer, or the unrolling by PyTorch made right.

A call that torchecho's kernels can serve becomes a call of `torchecho.rnn.aten`, which traces as one operator a layer.
Where autocast reduces the precision, which happens below this graph, conversions are written before the call. What the
kernels cannot serve (another type or device, no compiler) PyTorch unrolls into its steps, by
``torch._decomp.decompositions._rnn_helper``, which sets the dropout between layers to nothing at the first layer (seen
in torch 2.13). Such a call of several layers with dropout is therefore split beforehand into calls of one layer with
the dropout written between them, as ``nn.LSTM`` documents it.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from torchecho.rnn.aten import FUNCTIONS
from torchecho.rnn.dispatch import runs_natively

_NUM_ARGUMENTS = 9  # of the call on padded sequences; the one on packed sequences is left alone


def is_recurrent(node: fx.Node) -> bool:
    """Return whether a node of Dynamo's graph calls PyTorch's own recurrent layers."""
    name = getattr(node.target, "__name__", "")
    return name in FUNCTIONS and node.target is not FUNCTIONS[name]


def fuse_layers(module: fx.GraphModule) -> None:
    """Let torchecho's operators run every recurrent call that they can serve; changes the module."""
    nodes = [node for node in module.graph.nodes if is_recurrent(node) and _can_be_served(node)]
    for node in nodes:
        assert callable(node.target)
        _convert_operands(module.graph, node)
        node.target = FUNCTIONS[node.target.__name__]
    if nodes:
        module.recompile()


def _can_be_served(node: fx.Node) -> bool:
    if len(node.args) != _NUM_ARGUMENTS or not isinstance(node.args[2], (list, tuple)):
        return False  # a packed sequence: its sizes stand second
    made = _example(node)
    given = [_value(argument) for argument in _leaves(node.args[:3])]
    tensors = [value for value in (made, *given) if isinstance(value, torch.Tensor)]
    if len(tensors) != 1 + len(given) or any(t.dtype not in (made.dtype, torch.float32) for t in tensors):
        return False
    return runs_natively([t.to(made.dtype) for t in tensors])


def _convert_operands(graph: fx.Graph, node: fx.Node) -> None:
    """Convert what a call computes with to the type of what it makes."""
    made, known = _example(node), dict[fx.Node, fx.Node]()

    def converted(argument: fx.Node) -> fx.Node:
        if _value(argument).dtype == made.dtype:
            return argument
        if argument not in known:
            with graph.inserting_before(node):
                known[argument] = graph.call_method("to", (argument, made.dtype))
            known[argument].meta["example_value"] = _value(argument).to(made.dtype)
        return known[argument]

    operands = fx.map_arg(node.args[:3], converted)
    assert isinstance(operands, tuple)
    node.args = (*operands, *node.args[3:])


def _leaves(arguments: Any) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from _leaves(argument)
        else:
            yield argument


def _value(argument: Any) -> Any:
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else None


def split_layers(module: fx.GraphModule) -> None:
    """Split every recurrent call of several layers with dropout between them; changes the module."""
    nodes = [node for node in module.graph.nodes if _has_dropout_between_layers(node)]
    for node in nodes:
        _split(module.graph, node)
    if nodes:
        module.recompile()


def _has_dropout_between_layers(node: fx.Node) -> bool:
    if not is_recurrent(node) or len(node.args) != _NUM_ARGUMENTS:
        return False
    num_layers, dropout, train = node.args[4:7]
    picked = all(user.target is operator.getitem for user in node.users)
    return isinstance(num_layers, int) and num_layers > 1 and bool(dropout) and train is True and picked


def _split(graph: fx.Graph, node: fx.Node) -> None:
    x, states, weights, has_biases, num_layers, dropout, train, both_ways, batch_first = node.args
    assert isinstance(num_layers, int)
    assert isinstance(weights, Sequence)
    shape = _example(node)

    def call(target: Any, *args: Any, example: Any = None) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta.update({k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")})
        if example is not None:
            made.meta["example_value"] = example
        return made

    finals: list[list[fx.Node]] = []
    with graph.inserting_before(node):
        x = call(torch.transpose, x, 0, 1, example=shape) if batch_first else x
        for layer in range(num_layers):
            own = _part(weights, layer, num_layers)
            start = _start(call, states, layer, 2 if both_ways else 1)
            made = call(node.target, x, start, own, has_biases, 1, 0.0, train, both_ways, False)
            x = call(operator.getitem, made, 0, example=shape)
            num_states = len(states) if isinstance(states, (list, tuple)) else 1
            finals.append([call(operator.getitem, made, 1 + k) for k in range(num_states)])
            if layer < num_layers - 1:
                x = call(torch.dropout, x, dropout, True, example=shape)
        x = call(torch.transpose, x, 0, 1, example=shape) if batch_first else x
        results: list[Any] = [x, *(call(torch.cat, list(layers), 0) for layers in zip(*finals, strict=True))]
    for user in list(node.users):
        place = user.args[1]
        assert isinstance(place, int)
        user.replace_all_uses_with(results[place])
        graph.erase_node(user)
    graph.erase_node(node)


def _example(node: fx.Node) -> Any:
    """Return the example of what the last layer makes: that of every layer has the same sizes."""
    example = node.meta.get("example_value")
    return example[0] if isinstance(example, (list, tuple)) else None


def _part(items: Sequence[Any], layer: int, num_layers: int) -> list[Any]:
    size = len(items) // num_layers
    return list(items[layer * size : (layer + 1) * size])


def _start(call: Any, states: Any, layer: int, directions: int) -> Any:
    rows = slice(layer * directions, (layer + 1) * directions)
    if isinstance(states, (list, tuple)):
        return tuple(call(operator.getitem, state, rows) for state in states)
    return call(operator.getitem, states, rows)
