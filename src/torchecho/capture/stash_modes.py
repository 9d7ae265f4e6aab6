"""The stash modes of recurrent layers in a captured step: which layers have a choice, and how it is made.

A layer that was traced with ``stash="auto"`` may stash its gates, or rebuild them in the backward. All modes give the
same bits, so a plan may choose any for each layer; the graph of another choice differs in sizes and costs alone.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes  # private: no public way to leave a mode

from torchecho.errors import CaptureError

Modes = tuple[str, ...]

_FASTEST, _SMALLEST, _OPEN = "gates", "lean", "auto"
_STASHES = ("gates", "cells")  # what the operators call what they stash
_PARTS = 4


def alternatives(num_layers: int) -> list[Modes]:
    """Return the modes of all layers to plan for: all the fastest, then more and more of the first the smallest.

    The first layers are stashed the longest. A plan for each combination would take long, so a deep stack goes in
    quarters.
    """
    steps = min(num_layers, _PARTS)
    counts = dict.fromkeys(num_layers * step // max(steps, 1) for step in range(steps + 1))
    return [(_SMALLEST,) * count + (_FASTEST,) * (num_layers - count) for count in counts]


def is_open(target: object, args: Sequence[Any]) -> bool:
    """Return whether a call is that of a layer's forward whose mode a plan may choose."""
    place = _place(target, "stash")
    return place is not None and args[place] == _OPEN and _place(target, "y") is None


def output_of_layer(target: object, args: Sequence[Any]) -> Any:
    """Return the output of the layer that a call is the backward of; None if it is no such call."""
    if _place(target, "stash") is None or (place := _place(target, "y")) is None:
        return None
    return args[place]


def with_mode(target: object, args: Sequence[Any], mode: str) -> tuple[Any, ...]:
    """Return the arguments of a call with another mode."""
    place = _place(target, "stash")
    assert place is not None
    return (*args[:place], mode, *args[place + 1 :])


def smallest(modes: Modes) -> int:
    """Return how many layers stash the least."""
    return modes.count(_SMALLEST)


def _place(target: object, name: str) -> int | None:
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "torchecho":
        return None
    names = [argument.name for argument in target._schema.arguments]
    return names.index(name) if name in names else None


def open_layers(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls of layers whose mode a plan may choose, in the order of the graph."""
    return [node for node in graph.nodes if node.op == "call_function" and is_open(node.target, node.args)]


def set_modes(graph: fx.Graph, layers: Sequence[fx.Node], modes: Modes) -> None:
    """Give layers of a joint graph their modes, in the forward and in the backward; changes the graph.

    Raises:
        CaptureError: the backward of a layer does not read the layer's output.
    """
    chosen = dict(zip(layers, modes, strict=True))
    for node, mode in chosen.items():
        node.args = with_mode(node.target, node.args, mode)
        _renew_stash(node)
    for node in graph.nodes:
        output = output_of_layer(node.target, node.args)
        layer = _maker(output, chosen) if isinstance(output, fx.Node) else None
        if layer is not None:
            node.args = with_mode(node.target, node.args, chosen[layer])


def _renew_stash(node: fx.Node) -> None:
    """Let the values of a layer that it stashes have the sizes of its mode."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    assert callable(node.target)
    with torch.no_grad(), _disable_current_modes():
        made = node.target(*args, **kwargs)
    names = [result.name for result in node.target._schema.returns]  # type: ignore[attr-defined]
    values = [n if name in _STASHES else o for name, n, o in zip(names, made, node.meta["val"], strict=True)]
    node.meta["val"] = tuple(values)
    for user in _elements(node):
        place = user.args[1]
        assert isinstance(place, int)
        user.meta["val"] = values[place]


def _elements(node: fx.Node) -> Iterator[fx.Node]:
    return (user for user in node.users if user.args[0] is node and isinstance(user.args[1], int))


def _maker(value: fx.Node, layers: dict[fx.Node, str]) -> fx.Node | None:
    """Return the layer whose output a value is, or is a view of; None if it is that of a layer without a choice."""
    node = value
    while node not in layers:
        if node.op != "call_function":
            raise CaptureError(f"{value.name} is no output of a recurrent layer")
        if _place(node.target, "stash") is not None:
            return None
        node = node.all_input_nodes[0]
    return node
