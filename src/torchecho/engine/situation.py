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

    @property
    def size_bytes(self) -> int:
        """Bytes of all the tensors together, each in one piece."""
        kinds = ((shape, getattr(torch, dtype.removeprefix("torch."))) for shape, dtype in self.sizes)
        return sum(math.prod(shape) * int(kind.itemsize) for shape, kind in kinds)

    def is_like(self, other: "Situation") -> bool:
        """Return whether a step of another situation is of the same kind, and no gradients more are there."""
        kinds, other_kinds = ([(len(shape), dtype) for shape, dtype in one.sizes] for one in (self, other))
        return kinds == other_kinds and self.has_gradients >= other.has_gradients

    def covers(self, other: "Situation") -> bool:
        """Return whether a step of another situation is of the same kind and nowhere larger."""
        pairs = zip(self.sizes, other.sizes, strict=False)
        return self.is_like(other) and all(all(map(int.__ge__, own[0], others[0])) for own, others in pairs)


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


def largest(known: Mapping[Situation, P]) -> tuple[Situation, P] | None:
    """Return the largest situation with what is known of it; None where nothing is."""
    return max(known.items(), key=lambda item: item[0].volume) if known else None
