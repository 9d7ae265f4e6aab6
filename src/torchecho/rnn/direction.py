"""One direction of one layer as the kernels get it: what a layer of torch.nn's weights has in every family."""

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from torchecho.rnn.sequence import Chunk, Course, StepsStruct
from torchecho.rnn.weights import Weights


@dataclass(frozen=True)
class OneDirection:
    """One direction of one layer, and everything that both its passes read; families add what else they have."""

    course: Course
    x: Tensor  # [T, B, I] or [rows, I]
    h0: Tensor  # [B, P]
    weights: Weights
    y: Tensor  # [rows, P], a slice of the layer's output

    @property
    def units(self) -> int:
        """Return H; without a projection that is P."""
        return self.h0.shape[1]

    @property
    def bias(self) -> Tensor | None:
        """Return what is added to the product of the input: the sum of both biases."""
        first, second = self.weights.input_bias, self.weights.hidden_bias
        return None if first is None or second is None else first + second

    def steps(self, chunk: Chunk) -> StepsStruct:
        """Return what the kernels are told about the steps of a chunk."""
        return self.course.struct(chunk, self.weights.hidden.numel())

    def with_floats(self) -> Self:
        """Return it with weights and the first h in float32, h in one piece."""
        return replace(self, weights=self.weights.float(), h0=self.h0.float().contiguous())
