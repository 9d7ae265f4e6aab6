"""One Elman RNN layer as a PyTorch operator."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchecho.rnn.dispatch import kernels_for, runs_natively
from torchecho.rnn.elman import naive, native
from torchecho.rnn.family import Family, tensors_of
from torchecho.rnn.sequence import courses_of, default_chunk_steps
from torchecho.rnn.weights import weights_of


def elman(
    x: Tensor, batch_sizes: Tensor | None, h0: Tensor, weights: list[Tensor], nonlinearity: str
) -> tuple[Tensor, Tensor]:
    """Run one layer of one or two directions.

    Args:
        x: Padded input [T, B, I], or packed input [rows, I].
        batch_sizes: Rows of each step [T] of packed input, on the CPU.
        h0: First h, [D, B, H].
        weights: Of each direction in torch.nn's order: input, hidden, then both biases if any.
        nonlinearity: "tanh" or "relu".

    Returns:
        The output, [T, B, D * H] or [rows, D * H], and the last h of each sequence.
    """
    _, B, H = h0.shape
    chunk_steps = default_chunk_steps(B, H, x.device.type)
    y, h = _forward(x, batch_sizes, h0, weights, nonlinearity, chunk_steps)
    return y, h


@dataclass(frozen=True)
class _Layer:
    """The inputs of the operator."""

    x: Tensor
    batch_sizes: Tensor | None
    h0: Tensor
    weights: list[Tensor]
    nonlinearity: str
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
        return kernels_for("elman", tensors_of(self))

    def stash_room(self) -> tuple[Tensor, ...]:
        """Return nothing: the output is enough."""
        return ()

    def directions(self, y: Tensor, *_stash: Tensor) -> Iterator[native.Direction]:
        """Return each direction with its share of the output."""
        D, _, H = self.h0.shape
        rows, courses = y.flatten(0, -2), courses_of(self.x, self.batch_sizes, D, self.chunk_steps)
        for d, (course, weights) in enumerate(zip(courses, weights_of(self.weights, D), strict=True)):
            yield native.Direction(
                course=course,
                relu=self.nonlinearity == "relu",
                x=self.x,
                h0=self.h0[d],
                weights=weights,
                y=rows[:, d * H : (d + 1) * H],
            )

    def reference(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return y and h by plain PyTorch."""
        h0, *weights = others
        return naive.layer(x, self.batch_sizes, h0, weights_of(weights, h0.shape[0]), self.nonlinearity)


_forward = Family(
    name="elman",
    inputs="Tensor x, Tensor? batch_sizes, Tensor h0, Tensor[] weights, str nonlinearity, SymInt chunk_steps",
    states=("h",),
    stash=(),
    layer=_Layer,
).define()
