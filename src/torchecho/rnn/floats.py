"""Float32 views and copies of what a layer stores: the C++ kernels compute in float32, whatever the type of a layer.

A layer of bfloat16 is converted chunk by chunk. Its h is rounded as it is stored, step by step, and what is rebuilt is
rounded as it would have been stashed; so every stash mode reads the same numbers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchecho.rnn.library import pointer
from torchecho.rnn.sequence import Chunk, Course, rows_of

_FLOAT_BYTES = 4


def floats_of(sequence: Tensor, chunk: Chunk) -> Tensor:
    """Return the rows of a chunk of [T, B, features] or [rows, features] in float32; a view if it can be."""
    return rows_of(sequence, chunk).float()


def give_back(stored: Tensor, floats: Tensor) -> None:
    """Copy `floats` to where they came from by ``stored.float()``, unless that is the same tensor."""
    if floats is not stored:
        stored.copy_(floats)


def is_rounded(tensor: Tensor) -> int:
    """Return 1 if the kernels have to round what they make to be stored like `tensor`, else 0."""
    return int(tensor.dtype == torch.bfloat16)


@dataclass(frozen=True)
class Window:
    """The rows of y that the steps of a chunk read and write: their own, and those of the step before the chunk."""

    stored: Tensor  # [rows, P], a slice of the layer's output
    floats: Tensor  # the same in float32, or a copy of the rows from `first` on
    first: int

    @property
    def at(self) -> int:
        """Return where row 0 of y is, or would be: the kernels count rows from there."""
        return pointer(self.floats) - self.first * self.stride * _FLOAT_BYTES

    @property
    def stride(self) -> int:
        """Return the distance of rows."""
        return self.floats.stride(0)

    def give_back(self, chunk: Chunk) -> None:
        """Store the rows of the chunk."""
        if self.floats is not self.stored:
            begin = chunk.rows.start - self.first
            self.stored[chunk.rows].copy_(self.floats[begin : begin + chunk.num_rows])


def window_of(y: Tensor, course: Course, chunk: Chunk) -> Window:
    """Return the window of a chunk; it holds what `y` [rows, P] holds."""
    if y.dtype == torch.float32:
        return Window(y, y, 0)
    before, own = course.step_before(chunk), chunk.rows
    first = own.start if course.reverse or before.start == before.stop else before.start
    last = before.stop if course.reverse and before.stop else own.stop
    return Window(y, y[first:last].to(torch.float32, memory_format=torch.contiguous_format), first)
