"""Which variant of an LSTM a layer is, and the weights and the noise that come with it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Variant:
    """What a layer has that a plain LSTM has not; the fields are arguments of the operator, in this order."""

    layer_norm: bool = False
    peephole: bool = False
    coupled: bool = False  # f = 1 - i
    zoneout_cell: float = 0.0  # where no mask says which elements are kept
    zoneout_hidden: float = 0.0

    @property
    def gates(self) -> int:
        """Return the number of gates with weights."""
        return 3 if self.coupled else 4

    @property
    def weights_per_direction(self) -> tuple[int, int]:
        """Return the number of tensors without and with biases, the projection left out."""
        without = 2 + 3 * self.layer_norm + self.peephole
        return without, without + 2 + self.layer_norm


@dataclass(frozen=True)
class VariantWeights:
    """Weights of one direction; with G gates of H units, I inputs and P outputs (H without projection)."""

    input: Tensor  # [G * H, I]
    hidden: Tensor  # [G * H, P]
    input_bias: Tensor | None  # [G * H]
    hidden_bias: Tensor | None  # [G * H]
    projection: Tensor | None  # [P, H]
    input_norm: Tensor | None  # [G * H]
    hidden_norm: Tensor | None  # [G * H]
    cell_norm: Tensor | None  # [H]
    cell_bias: Tensor | None  # [H]
    peephole: Tensor | None  # [3 * H] of i, f and o; [2 * H] of i and o if coupled

    @property
    def bias(self) -> Tensor | None:
        """Return the sum of both biases."""
        first, second = self.input_bias, self.hidden_bias
        return None if first is None or second is None else first + second

    def empty(self) -> "VariantWeights":
        """Return tensors of the same shapes that are not written yet, for gradients."""
        every = [getattr(self, field.name) for field in fields(self)]
        like = torch.contiguous_format
        empty: list[Any] = [None if t is None else torch.empty_like(t, memory_format=like) for t in every]
        return VariantWeights(*empty)

    def tensors(self) -> list[Tensor]:
        """Return those that there are, in the order of `variant_weights`."""
        every = [getattr(self, field.name) for field in fields(self)]
        return [tensor for tensor in every if tensor is not None]


def variant_weights(tensors: Sequence[Tensor], variant: Variant, directions: int) -> tuple[VariantWeights, ...]:
    """Sort the tensors of a layer by direction and by name."""
    size = len(tensors) // directions
    rows, outputs = tensors[1].shape
    projected = rows != variant.gates * outputs
    biased = size - projected == variant.weights_per_direction[1]
    parts = [tensors[d * size : (d + 1) * size] for d in range(directions)]
    return tuple(_one_direction(part, variant, biased, projected) for part in parts)


def _one_direction(
    tensors: Sequence[Tensor],
    variant: Variant,
    biased: bool,  # noqa: FBT001 - as `variant_weights` found it
    projected: bool,  # noqa: FBT001 - as above
) -> VariantWeights:
    rest, norm = iter(tensors), variant.layer_norm
    has = (True, True, biased, biased, projected, norm, norm, norm, norm and biased, variant.peephole)
    found = [next(rest) if there else None for there in has]
    weight, hidden, *others = found
    assert weight is not None
    assert hidden is not None
    return VariantWeights(weight, hidden, *others)


@dataclass(frozen=True)
class Noise:
    """What was drawn for one direction."""

    drop: Tensor | None  # [B, P]: 0 or 1 / (1 - p), multiplies h wherever the recurrent weights read it
    zone_cell: Tensor | None  # [rows, H] uint8: 1 where c stays as it was
    zone_hidden: Tensor | None  # [rows, P] uint8: 1 where h stays as it was


def noise_of(drop: Tensor | None, zone_cell: Tensor | None, zone_hidden: Tensor | None, direction: int) -> Noise:
    """Return the share of one direction in what was drawn for a layer: each tensor has directions first."""
    return Noise(*(None if t is None else t[direction] for t in (drop, zone_cell, zone_hidden)))


def row_places(sizes: Sequence[int]) -> Tensor:
    """Return the place in the batch of each row of steps that have so many rows."""
    return torch.cat([torch.arange(size) for size in sizes])
