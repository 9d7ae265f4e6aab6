"""What a step starts from, and which plan serves it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Situation:
    """What a step starts from; steps that start from the same are taken for alike.

    Attributes:
        sizes: Shape and dtype of each tensor that the program is given.
        has_gradients: Gradients of an earlier backward are there, so that this one adds to them.
    """

    sizes: tuple[tuple[tuple[int, ...], str], ...]
    has_gradients: bool

    @property
    def volume(self) -> int:
        """Numbers in all the tensors together."""
        return sum(math.prod(shape) for shape, _ in self.sizes)

    def covers(self, other: "Situation") -> bool:
        """Return whether a step of another situation is of the same kind and nowhere larger."""
        if self.has_gradients < other.has_gradients or len(self.sizes) != len(other.sizes):
            return False
        return all(
            dtype == other_dtype and len(shape) == len(other_shape) and all(map(int.__ge__, shape, other_shape))
            for (shape, dtype), (other_shape, other_dtype) in zip(self.sizes, other.sizes, strict=True)
        )


def situation_of(tensors: Iterable[torch.Tensor], *, has_gradients: bool) -> Situation:
    """Return the situation of a step on some tensors."""
    return Situation(tuple((tuple(t.shape), str(t.dtype)) for t in tensors), has_gradients)


def closest(situation: Situation, known: Mapping[Situation, P]) -> tuple[Situation, P] | None:
    """Return the smallest known situation that covers one, itself before others; else None."""
    if situation in known:
        return situation, known[situation]
    covering = [one for one in known if one.covers(situation)]
    if not covering:
        return None
    best = min(covering, key=lambda one: one.volume)
    return best, known[best]


def largest(known: Mapping[Situation, P]) -> P | None:
    """Return what is known of the largest situation; None where nothing is."""
    return known[max(known, key=lambda one: one.volume)] if known else None
