"""Gradients of one direction: those that come in and where they go, and those of the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchecho.rnn import gemm
from torchecho.rnn.floats import give_back
from torchecho.rnn.weights import Weights


@dataclass(frozen=True)
class Gradients:
    """Gradients of one direction: what comes in, and where it goes."""

    dy: Tensor  # [T, B, P] or [rows, P], a slice of the gradient of the layer's output
    dh: Tensor  # [B, P], of the last h; becomes that of h0 if that is needed, else anything
    dx: Tensor | None  # [rows, I]
    add_to_dx: bool  # whether dx already holds the other direction's
    needs_dh0: bool

    def give_dx(self, rows: slice, dgates: Tensor, weight: gemm.Right) -> None:
        """Write a product as the gradient of some rows of x, or add it to the other direction's."""
        assert self.dx is not None, "asked for only where x needs a gradient"
        stored = self.dx[rows]
        floats = stored.float()
        gemm.product(floats, dgates, weight, accumulate=self.add_to_dx)
        give_back(stored, floats)


@dataclass(frozen=True)
class CellGradients(Gradients):
    """Gradients of one direction of a family that carries c, too."""

    dc: Tensor  # [B, H], of the last c; becomes that of c0


@dataclass(frozen=True)
class LayerGradients:
    """Gradients of a whole layer: what comes in, and where that of its inputs goes."""

    dy: Tensor  # [T, B, D * P] or [rows, D * P]
    states: list[Tensor]  # each [D, B, features], of the last states; become those of the first
    dx: Tensor  # like x, or empty where it is not needed
    needs_dx: bool
    needs_dh0: bool

    @staticmethod
    def of(
        x: Tensor,
        y: Tensor,
        first_states: Sequence[Tensor],
        incoming: Sequence[Tensor | None],
        *,
        needs_dx: bool,
        needs_dh0: bool,
    ) -> "LayerGradients":
        """Make room for the gradients of x and the first states.

        Args:
            x: Input of the layer.
            y: Output of the layer.
            first_states: h0, and c0 where there is one.
            incoming: Gradients of y and of the last states; None stands for zeros.
            needs_dx: Whether x needs a gradient.
            needs_dh0: Whether h0 does.
        """
        dy, *last = incoming
        states = [_own(gradient, like) for gradient, like in zip(last, first_states, strict=True)]
        dy = y.new_zeros(y.shape) if dy is None else dy
        return LayerGradients(dy, states, room(x, needed=needs_dx), needs_dx, needs_dh0)

    def of_direction(self, d: int) -> Gradients:
        """Return the share of one direction; the second adds its gradient of x to that of the first."""
        dh, *others = [state[d] for state in self.states]
        P, dx = dh.shape[1], self.dx.flatten(0, -2) if self.needs_dx else None
        shares = self.dy[..., d * P : (d + 1) * P], dh, dx, d > 0, self.needs_dh0
        return CellGradients(*shares, *others) if others else Gradients(*shares)

    def of_inputs(self) -> tuple[Tensor, ...]:
        """Return those of x and the first states; empty ones where they are not needed."""
        dh0, *others = self.states
        return self.dx, dh0 if self.needs_dh0 else dh0.new_empty(0), *others


def _own(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient as a tensor that may be written; None stands for zeros."""
    if gradient is None:
        return like.new_zeros(like.shape)
    return gradient.clone(memory_format=torch.contiguous_format)


def room(like: Tensor, *, needed: bool) -> Tensor:
    """Return a tensor for a gradient, not written yet; an empty one where it is not needed."""
    return like.new_empty(like.shape if needed else (0,))


@dataclass(frozen=True)
class WeightGradients:
    """Gradients of the weights of one direction; biases have one gradient for each side of the cell."""

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    projection: Tensor | None

    @staticmethod
    def of(weights: Weights) -> "WeightGradients":
        """Return gradients that are not written yet."""

        def empty(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)

        input_weight, hidden_weight = empty(weights.input), empty(weights.hidden)
        assert input_weight is not None
        assert hidden_weight is not None
        biases = (empty(weights.input_bias), empty(weights.hidden_bias))
        return WeightGradients(input_weight, hidden_weight, *biases, empty(weights.projection))

    def add(self, dgates: Tensor, x: Tensor, h_before: Tensor, *, first: bool, pairs: bool = False) -> None:
        """Add the gradients of a chunk, or write them if it is the first; biases meet in one sum: that of the input's.

        Args:
            dgates: Gradients of the gates before activation, [rows, G * H].
            x: What the input's weights multiplied, [rows, I].
            h_before: What the recurrent weights multiplied, [rows, P].
            first: Whether nothing is written yet.
            pairs: Whether to multiply pairs of bfloat16.
        """
        gemm.product(self.input, dgates.t(), gemm.right(x, pairs=pairs), accumulate=not first)
        gemm.product(self.hidden, dgates.t(), gemm.right(h_before, pairs=pairs), accumulate=not first)
        if self.input_bias is not None:
            gemm.sum_rows(self.input_bias, dgates, accumulate=not first)

    def tensors(self) -> list[Tensor]:
        """Return them in torch.nn's order."""
        every = (self.input, self.hidden, self.input_bias, self.hidden_bias, self.projection)
        return [tensor for tensor in every if tensor is not None]

    def to(self, dtype: torch.dtype) -> "WeightGradients":
        """Return them in another type: themselves if it is their own."""
        every = (self.input_bias, self.hidden_bias, self.projection)
        others = [None if tensor is None else tensor.to(dtype) for tensor in every]
        return WeightGradients(self.input.to(dtype), self.hidden.to(dtype), *others)
