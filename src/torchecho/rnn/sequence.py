"""Where the rows of a padded or packed sequence lie, and in which chunks of steps it is processed."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchecho.rnn.library import Struct, numbers, pointer, threads_for

_CHUNK_UNITS = 2**18  # rows times H: 4 MiB of LSTM gates
_FEWEST_CHUNK_ROWS, _MOST_CHUNK_ROWS = 256, 1024
_FEWEST_CHUNK_STEPS = 4
_MOST_CUDA_CHUNK_STEPS = 64


class StepsStruct(Struct):
    """The kernels' view of one chunk."""

    _fields_ = numbers("offsets num_steps reverse begin end threads")


@dataclass(frozen=True)
class Chunk:
    """Steps ``begin`` to ``end`` and their rows; `index` counts chunks in the order of processing."""

    index: int
    begin: int
    end: int
    rows: slice

    @property
    def num_rows(self) -> int:
        """Return the number of rows of all its steps."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class Layout:
    """Row b of step t is row ``offsets[t] + b`` of the whole; a step has a row for each sequence so long."""

    offsets: Tensor  # [T + 1] int64
    starts: tuple[int, ...]  # the same numbers
    batch: int

    @property
    def num_steps(self) -> int:
        """Return T."""
        return len(self.starts) - 1

    @property
    def num_rows(self) -> int:
        """Return the rows of all steps."""
        return self.starts[-1]

    def step_rows(self, t: int) -> int:
        """Return the rows of one step; none beyond either end."""
        return self.starts[t + 1] - self.starts[t] if 0 <= t < self.num_steps else 0

    def chunks(self, chunk_steps: int, *, reverse: bool) -> list[Chunk]:
        """Cut the steps into the fewest chunks of at most `chunk_steps`, all about as long, in processing order."""
        count = -(-self.num_steps // chunk_steps)
        bounds = [self.num_steps * place // count for place in range(count + 1)]
        spans = list(itertools.pairwise(bounds))
        if reverse:
            spans.reverse()
        return [Chunk(i, b, e, slice(self.starts[b], self.starts[e])) for i, (b, e) in enumerate(spans)]

    def struct(self, chunk: Chunk, weights: int, *, reverse: bool) -> StepsStruct:
        """Return what the kernels are told about a chunk, whose steps each multiply all rows by so many weights."""
        return StepsStruct(
            offsets=pointer(self.offsets),
            num_steps=self.num_steps,
            reverse=int(reverse),
            begin=chunk.begin,
            end=chunk.end,
            threads=threads_for(2.0 * self.batch * weights),
        )


def layout_of(x: Tensor, batch_sizes: Tensor | None) -> Layout:
    """Return the layout of padded input [T, B, I], or of packed input [rows, I] with its batch sizes [T]."""
    if batch_sizes is None:
        num_steps, batch = x.shape[0], x.shape[1]
        offsets = torch.arange(num_steps + 1) * batch
    else:
        batch = int(batch_sizes[0])
        offsets = torch.cat((batch_sizes.new_zeros(1), batch_sizes.cumsum(0)))
    return Layout(offsets, tuple(offsets.tolist()), batch)


def default_chunk_steps(batch: int, units: int, device_type: str = "cpu") -> int:
    """Return the steps of a chunk: enough rows for products to be efficient, few enough to stay in the cache.

    A GPU takes four times as many, since its caches are larger and a product there needs more rows.
    """
    more = 4 if device_type == "cuda" else 1
    rows = min(max(more * _CHUNK_UNITS // units, more * _FEWEST_CHUNK_ROWS), more * _MOST_CHUNK_ROWS)
    steps = max(_FEWEST_CHUNK_STEPS, -(-rows // max(batch, 1)))
    return min(steps, _MOST_CUDA_CHUNK_STEPS) if device_type == "cuda" else steps


def rows_of(sequence: Tensor, chunk: Chunk) -> Tensor:
    """Return the rows of a chunk of [T, B, features] or [rows, features]; a view if it can be."""
    if sequence.dim() == 2:
        rows = sequence[chunk.rows]
    else:
        rows = sequence[chunk.begin : chunk.end].reshape(chunk.num_rows, sequence.shape[2])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rows_before(y: Tensor, h0: Tensor, layout: Layout, chunk: Chunk, *, reverse: bool) -> Tensor:
    """Return h before each row of a chunk: `y` [rows, P] one step earlier, or `h0` [B, P] where a sequence starts.

    A view of `y` where every step of the chunk and the one before have equally many rows, else a copy.
    """
    pieces = list(_pieces_before(y, h0, layout, chunk, reverse=reverse))
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else y[chunk.rows]


def _pieces_before(y: Tensor, h0: Tensor, layout: Layout, chunk: Chunk, *, reverse: bool) -> Iterator[Tensor]:
    shift = 1 if reverse else -1
    begin = chunk.begin
    while begin < chunk.end:
        many = layout.step_rows(begin)
        continuing = min(many, layout.step_rows(begin + shift))
        end = begin + 1
        if continuing == many == layout.step_rows(begin + shift):
            while end < chunk.end and many == layout.step_rows(end) == layout.step_rows(end + shift):
                end += 1
        first = layout.starts[begin + shift] if continuing else 0
        if continuing:
            yield y[first : first + (end - begin - 1) * many + continuing]
        if continuing < many:
            yield h0[continuing:many]
        begin = end


def last_rows(y: Tensor, layout: Layout, *, reverse: bool) -> Tensor:
    """Return h after the last processed step of every sequence: [B, P] copied from `y` [rows, P]."""
    if reverse or layout.num_rows == layout.num_steps * layout.batch:
        start = 0 if reverse else layout.num_rows - layout.batch
        return y[start : start + layout.batch].clone()
    sizes = layout.offsets.diff()
    lengths = (sizes[:, None] > torch.arange(layout.batch)).sum(0)
    return y[layout.offsets[lengths - 1] + torch.arange(layout.batch)]
