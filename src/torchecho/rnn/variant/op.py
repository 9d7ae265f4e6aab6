"""One layer of an LSTM variant as a PyTorch operator, with the variant and the stash mode as arguments."""

import functools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from torchecho.rnn.dispatch import NO_STASH, cpp_takes, needs_backward
from torchecho.rnn.family import Family, tensors_of
from torchecho.rnn.sequence import courses_of, default_chunk_steps
from torchecho.rnn.variant import naive, native
from torchecho.rnn.variant.cell import Variant, noise_of, variant_weights

_KEPT = ("gates", "inputs", "products", "statistics", "cells")
Drawn = tuple[Tensor | None, Tensor | None, Tensor | None]


def lstm_variant(
    x: Tensor,
    batch_sizes: Tensor | None,
    states: tuple[Tensor, Tensor],
    weights: list[Tensor],
    variant: Variant,
    drawn: Drawn,
    stash: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer of one or two directions.

    Args:
        x: Padded input [T, B, I], or packed input [rows, I].
        batch_sizes: Rows of each step [T] of packed input, on the CPU.
        states: First h [D, B, P] and c [D, B, H].
        weights: Of each direction, those of `cell.VariantWeights` that the variant has.
        variant: Which variant it is.
        drawn: Noise: the dropout of h [D, B, P], and uint8 masks of the elements of c [D, rows, H] and of h
            [D, rows, P] that stay.
        stash: One of `stash.MODES`.

    Returns:
        The output, [T, B, D * P] or [rows, D * P], and the last h and c of each sequence.
    """
    if not needs_backward((x, *states, *weights)):
        stash = NO_STASH
    chunk_steps = default_chunk_steps(*states[1].shape[1:])
    y, h, c, *_ = _forward(x, batch_sizes, *states, weights, *drawn, *astuple(variant), stash, chunk_steps)
    return y, h, c


@dataclass(frozen=True)
class _Layer:
    """The inputs of the operator."""

    x: Tensor
    batch_sizes: Tensor | None
    h0: Tensor
    c0: Tensor
    weights: list[Tensor]
    drop: Tensor | None
    zone_cell: Tensor | None
    zone_hidden: Tensor | None
    variant: Variant
    stash: str
    chunk_steps: int

    @staticmethod
    def of(*inputs: Any) -> "_Layer":
        """Sort the arguments of the operator."""
        sorted_inputs = (*inputs[:8], Variant(*inputs[8:13]), *inputs[13:15])
        return _Layer(*sorted_inputs)

    @property
    def first_states(self) -> tuple[Tensor, ...]:
        """Return h0 and c0."""
        return self.h0, self.c0

    @functools.cached_property
    def by_kernels(self) -> bool:
        """Return whether the kernels run it: those in C++, of float32 alone."""
        return self.x.dtype == torch.float32 and cpp_takes(tensors_of(self))

    @property
    def kernels(self) -> Any:
        """Return the module of the kernels that run it."""
        return native

    def stash_room(self) -> tuple[Tensor, ...]:
        """Return what is stashed, in the order of `native.Kept`, not written yet."""
        return tuple(self.x.new_empty(shape) for shape in self._kept(math.prod(self.x.shape[:-1])))

    def _kept(self, rows: int) -> list[tuple[int, ...]]:
        D, B, H = self.c0.shape
        nothing, width = (D, 0), self.variant.gates * H
        stash = self.stash if self.by_kernels else NO_STASH
        if stash == "gates":
            every = (D, rows, width)
            gates = [nothing, every, every, (D, rows, 4)] if self.variant.layer_norm else [every, *[nothing] * 3]
            return [*gates, (D, rows, H)]
        num_steps = self.x.shape[0] if self.batch_sizes is None else self.batch_sizes.shape[0]
        cells = (D, -(-num_steps // self.chunk_steps), B, H) if stash == "lean" else nothing
        return [*[nothing] * (len(_KEPT) - 1), cells]

    def directions(self, y: Tensor, *stash: Tensor) -> Iterator[native.Direction]:
        """Return each direction with its share of the output and of the stash."""
        D, _, P = self.h0.shape
        rows, courses = y.flatten(0, -2), courses_of(self.x, self.batch_sizes, D, self.chunk_steps)
        sorted_weights = variant_weights(self.weights, self.variant, D)
        for d, (course, weights) in enumerate(zip(courses, sorted_weights, strict=True)):
            yield native.Direction(
                course=course,
                stash=self.stash,
                variant=self.variant,
                noise=noise_of(self.drop, self.zone_cell, self.zone_hidden, d),
                x=self.x,
                h0=self.h0[d],
                c0=self.c0[d],
                weights=weights,
                y=rows[:, d * P : (d + 1) * P],
                kept=native.Kept(*(t[d] for t in stash)),
            )

    def reference(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return y, h and c by plain PyTorch."""
        h0, c0, *weights = others
        D = h0.shape[0]
        noise = [noise_of(self.drop, self.zone_cell, self.zone_hidden, d) for d in range(D)]
        return naive.layer(x, self.batch_sizes, h0, c0, variant_weights(weights, self.variant, D), self.variant, noise)


_forward = Family(
    name="lstm_variant",
    inputs="Tensor x, Tensor? batch_sizes, Tensor h0, Tensor c0, Tensor[] weights,"
    " Tensor? drop, Tensor? zone_cell, Tensor? zone_hidden,"
    " bool layer_norm, bool peephole, bool coupled, float zoneout_cell, float zoneout_hidden,"
    " str stash, SymInt chunk_steps",
    states=("h", "c"),
    stash=_KEPT,
    layer=_Layer.of,
).define()
