"""One GRU layer as a PyTorch operator, with the stash mode as an argument."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchecho.rnn.dispatch import NO_STASH, kernels_for, needs_backward, runs_natively
from torchecho.rnn.family import Family, tensors_of
from torchecho.rnn.gru import naive, native
from torchecho.rnn.sequence import courses_of, default_chunk_steps
from torchecho.rnn.weights import weights_of


def gru(x: Tensor, batch_sizes: Tensor | None, h0: Tensor, weights: list[Tensor], stash: str) -> tuple[Tensor, Tensor]:
    """Run one layer of one or two directions.

    Args:
        x: Padded input [T, B, I], or packed input [rows, I].
        batch_sizes: Rows of each step [T] of packed input, on the CPU.
        h0: First h, [D, B, H].
        weights: Of each direction in torch.nn's order: input, hidden, then both biases if any.
        stash: One of `stash.MODES`; or ``"auto"``: ``"lean"``, unless a plan chooses another.

    Returns:
        The output, [T, B, D * H] or [rows, D * H], and the last h of each sequence.
    """
    if not needs_backward((x, h0, *weights)):
        stash = NO_STASH
    _, B, H = h0.shape
    chunk_steps = default_chunk_steps(B, H, x.device.type)
    y, h, _ = _forward(x, batch_sizes, h0, weights, stash, chunk_steps)
    return y, h


@dataclass(frozen=True)
class _Layer:
    """The inputs of the operator."""

    x: Tensor
    batch_sizes: Tensor | None
    h0: Tensor
    weights: list[Tensor]
    stash: str
    chunk_steps: int

    @property
    def first_states(self) -> tuple[Tensor, ...]:
        """Return h0."""
        return (self.h0,)

    @functools.cached_property
    def by_kernels(self) -> bool:
        """Return whether the kernels run it."""
        return runs_natively(tensors_of(self))

    @functools.cached_property
    def kernels(self) -> Any:
        """Return the module of the kernels that run it."""
        return kernels_for("gru", tensors_of(self))

    def stash_room(self) -> tuple[Tensor, ...]:
        """Return the gates that are stashed, not written yet."""
        x, (D, _, H) = self.x, self.h0.shape
        kept = self.stash == "gates" and self.by_kernels
        return (x.new_empty((D, math.prod(x.shape[:-1]), 4 * H) if kept else (0,)),)

    def directions(self, y: Tensor, *stash: Tensor) -> Iterator[native.Direction]:
        """Return each direction with its share of the output and of the stash."""
        (gates,), (D, _, H) = stash, self.h0.shape
        rows, courses = y.flatten(0, -2), courses_of(self.x, self.batch_sizes, D, self.chunk_steps)
        for d, (course, weights) in enumerate(zip(courses, weights_of(self.weights, D), strict=True)):
            yield native.Direction(
                course=course,
                x=self.x,
                h0=self.h0[d],
                weights=weights,
                y=rows[:, d * H : (d + 1) * H],
                gates=gates[d] if gates.dim() > 1 else None,
            )

    def reference(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return y and h by plain PyTorch."""
        h0, *weights = others
        return naive.layer(x, self.batch_sizes, h0, weights_of(weights, h0.shape[0]))


_forward = Family(
    name="gru",
    inputs="Tensor x, Tensor? batch_sizes, Tensor h0, Tensor[] weights, str stash, SymInt chunk_steps",
    states=("h",),
    stash=("gates",),
    layer=_Layer,
).define()
