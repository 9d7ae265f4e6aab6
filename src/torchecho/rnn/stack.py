"""Layers on top of each other, with dropout between them, as torch.nn runs them."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

#: Runs one layer: input, batch sizes, first states and weights to output and last states.
Layer = Callable[[Tensor, Tensor | None, tuple[Tensor, ...], list[Tensor]], tuple[Tensor, ...]]


def run_stack(
    layer: Layer,
    x: Tensor,
    batch_sizes: Tensor | None,
    states: Sequence[Tensor],
    weights: Sequence[list[Tensor]],
    dropout: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:
    """Run layers one after the other.

    Args:
        layer: Runs one of them, in all its directions.
        x: Padded input [T, B, I], or packed input [rows, I].
        batch_sizes: Rows of each step [T] of packed input, on the CPU.
        states: First states, each [L * D, B, features], layer by layer.
        weights: Weights of each of the L layers, those of all its directions in one list.
        dropout: Probability of dropping an element of what one layer hands to the next.

    Returns:
        The output of the last layer, and the last states in the layout of `states`.
    """
    directions = states[0].shape[0] // len(weights)
    finals = []
    for place, own in enumerate(weights):
        first = tuple(state[place * directions : (place + 1) * directions] for state in states)
        if place and dropout:
            x = F.dropout(x, dropout, training=True)
        x, *last = layer(x, batch_sizes, first, own)
        finals.append(last)
    return x, [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*finals, strict=True)]
