"""One LSTM layer as a PyTorch operator, with the stash mode as an argument."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchecho.rnn.dispatch import NO_STASH, cpp_takes, kernels_for, needs_backward, runs_natively
from torchecho.rnn.family import Family, tensors_of
from torchecho.rnn.lstm import naive, native
from torchecho.rnn.lstm.stash import MODES
from torchecho.rnn.sequence import courses_of, default_chunk_steps
from torchecho.rnn.weights import weights_of


def lstm(
    x: Tensor, batch_sizes: Tensor | None, h0: Tensor, c0: Tensor, weights: list[Tensor], stash: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer of one or two directions.

    Args:
        x: Padded input [T, B, I], or packed input [rows, I].
        batch_sizes: Rows of each step [T] of packed input, on the CPU.
        h0: First h, [D, B, P].
        c0: First c, [D, B, H].
        weights: Of each direction in torch.nn's order: input, hidden, then both biases and the projection if any.
        stash: One of `stash.MODES`; or ``"auto"``: ``"lean"``, unless a plan chooses another.

    Returns:
        The output, [T, B, D * P] or [rows, D * P], and the last h and c of each sequence.
    """
    if not needs_backward((x, h0, c0, *weights)):
        stash = NO_STASH
    _, B, H = c0.shape
    chunk_steps = default_chunk_steps(B, H, x.device.type)
    y, h, c, _, _ = _forward(x, batch_sizes, h0, c0, weights, stash, chunk_steps)
    return y, h, c


@dataclass(frozen=True)
class _Layer:
    """The inputs of the operator."""

    x: Tensor
    batch_sizes: Tensor | None
    h0: Tensor
    c0: Tensor
    weights: list[Tensor]
    stash: str
    chunk_steps: int

    @property
    def first_states(self) -> tuple[Tensor, ...]:
        """Return h0 and c0."""
        return self.h0, self.c0

    @property
    def mode(self) -> str:
        """Return what is stashed: the least where no plan has chosen.

        Gates before activation, rounded to bfloat16, would not have the bits of other modes: the activations are kept.
        """
        if self.stash == "preact" and self.x.dtype == torch.bfloat16 and cpp_takes(tensors_of(self)):
            return "gates"
        return MODES[-1] if self.stash == "auto" else self.stash

    @functools.cached_property
    def by_kernels(self) -> bool:
        """Return whether the kernels run it."""
        return runs_natively(tensors_of(self))

    @property
    def cell_dtype(self) -> torch.dtype:
        """Return the type in which c is carried and stashed: kernels have at least float32."""
        return torch.float32 if self.by_kernels else self.x.dtype

    @functools.cached_property
    def kernels(self) -> Any:
        """Return the module of the kernels that run it."""
        return kernels_for("lstm", tensors_of(self))

    def stash_room(self) -> tuple[Tensor, ...]:
        """Return the gates and cells that are stashed, not written yet."""
        x, (D, B, H), rows = self.x, self.c0.shape, math.prod(self.x.shape[:-1])
        num_steps = x.shape[0] if self.batch_sizes is None else self.batch_sizes.shape[0]
        stash = self.mode if self.by_kernels else NO_STASH
        every, chunks = (D, rows, H), (D, -(-num_steps // self.chunk_steps), B, H)
        cells = {"gates": every, "preact": chunks, "cell": every, "lean": chunks}.get(stash, (0,))
        gates = (D, rows, 4 * H) if stash in ("gates", "preact") else (0,)
        return x.new_empty(gates), x.new_empty(cells, dtype=self.cell_dtype)

    def directions(self, y: Tensor, *stash: Tensor) -> Iterator[native.Direction]:
        """Return each direction with its share of the output and of the stash."""
        (gates, cells), (D, _, P) = stash, self.h0.shape
        rows, courses = y.flatten(0, -2), courses_of(self.x, self.batch_sizes, D, self.chunk_steps)
        for d, (course, weights) in enumerate(zip(courses, weights_of(self.weights, D), strict=True)):
            yield native.Direction(
                course=course,
                stash=self.mode,
                x=self.x,
                h0=self.h0[d],
                c0=self.c0[d],
                weights=weights,
                y=rows[:, d * P : (d + 1) * P],
                gates=gates[d] if gates.dim() > 1 else gates,
                cells=cells[d] if cells.dim() > 1 else cells,
            )

    def reference(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return y, h and c by plain PyTorch."""
        h0, c0, *weights = others
        return naive.layer(x, self.batch_sizes, h0, c0, weights_of(weights, h0.shape[0]))


_forward = Family(
    name="lstm",
    inputs="Tensor x, Tensor? batch_sizes, Tensor h0, Tensor c0, Tensor[] weights, str stash, SymInt chunk_steps",
    states=("h", "c"),
    stash=("gates", "cells"),
    layer=_Layer,
).define()
