"""Gradients of the weights of one direction."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchecho.rnn import gemm
from torchecho.rnn.weights import Weights


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

    def add(self, dgates: Tensor, x: Tensor, h_before: Tensor, *, first: bool) -> None:
        """Add the gradients of a chunk, or write them if it is the first; biases meet in one sum: that of the input's.

        Args:
            dgates: Gradients of the gates before activation, [rows, G * H].
            x: What the input's weights multiplied, [rows, I].
            h_before: What the recurrent weights multiplied, [rows, P].
            first: Whether nothing is written yet.
        """
        gemm.product(self.input, dgates.t(), x, accumulate=not first)
        gemm.product(self.hidden, dgates.t(), h_before, accumulate=not first)
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
