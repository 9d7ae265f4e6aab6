"""The weights of one direction of one layer, in the order in which torch.nn lists them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """Weights of one direction; with G gates of H units, I inputs and P outputs (H without projection)."""

    input: Tensor  # [G * H, I]
    hidden: Tensor  # [G * H, P]
    input_bias: Tensor | None = None  # [G * H]
    hidden_bias: Tensor | None = None  # [G * H]
    projection: Tensor | None = None  # [P, H]

    def float(self) -> "Weights":
        """Return them in float32: themselves if they are."""
        first, second, projection = self.input_bias, self.hidden_bias, self.projection
        return Weights(
            self.input.float(),
            self.hidden.float(),
            None if first is None else first.float(),
            None if second is None else second.float(),
            None if projection is None else projection.float(),
        )


def weights_of(tensors: Sequence[Tensor], directions: int) -> tuple[Weights, ...]:
    """Sort the tensors of a layer by direction: 2 each without biases, 4 with, and one more if projected."""
    size = len(tensors) // directions
    return tuple(_one_direction(tensors[d * size : (d + 1) * size]) for d in range(directions))


def _one_direction(tensors: Sequence[Tensor]) -> Weights:
    projection = tensors[-1] if len(tensors) % 2 else None
    biases = tensors[2:4] if len(tensors) >= 4 else (None, None)
    return Weights(tensors[0], tensors[1], biases[0], biases[1], projection)
