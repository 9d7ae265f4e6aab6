"""How many FLOPs the operators do, for whoever counts or estimates: the products alone, as torch counts its own."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]


def _products(x: Shape, weights: Sequence[Shape]) -> int:
    """Return the FLOPs of multiplying every row of the input, or of what follows from it, by all matrices."""
    return 2 * math.prod(x[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _rebuilt(weights: Sequence[Shape]) -> list[Shape]:
    """Return the matrices that a rebuild of the gates multiplies by: all but those of projections."""
    return [weight for weight in weights if weight[0] == weights[0][0]]


def register(forward: Any, backward: Any, *, weights_at: int, stash_at: int | None) -> None:
    """Tell torch the FLOPs of an operator and of its backward.

    Args:
        forward: The operator.
        backward: Its backward, which takes the same arguments and more.
        weights_at: Where among the arguments the weights stand.
        stash_at: Where the stash mode stands; None for operators that rebuild nothing.
    """

    @register_flop_formula(forward)
    def _(*shapes: Any, **_: Any) -> int:
        return _products(shapes[0], shapes[weights_at])

    @register_flop_formula(backward)
    def _(*shapes: Any, **_: Any) -> int:
        x, weights = shapes[0], shapes[weights_at]
        rebuilds = stash_at is not None and shapes[stash_at] not in ("gates", "preact")
        return 2 * _products(x, weights) + (_products(x, _rebuilt(weights)) if rebuilds else 0)


def packet(name: str) -> Any:
    """Return an operator of torchecho by its name."""
    return getattr(torch.ops.torchecho, name)
