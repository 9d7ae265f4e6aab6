"""Where the rows of a padded or packed sequence lie, and in which chunks of steps it is processed."""

import ctypes
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchecho.rnn.library import Struct, numbers, threads_for

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
    """Row b of step t is row ``starts[t] + b`` of the whole; a step has a row for each sequence so long."""

    starts: tuple[int, ...]  # T + 1
    batch: int

    @property
    def num_steps(self) -> int:
        """Return T."""
        return len(self.starts) - 1

    @property
    def num_rows(self) -> int:
        """Return the rows of all steps."""
        return self.starts[-1]

    @functools.cached_property
    def offsets(self) -> "ctypes.Array[ctypes.c_int64]":
        """Return `starts` as the kernels read them: for as long as the layout lives."""
        return (ctypes.c_int64 * len(self.starts))(*self.starts)

    def step_rows(self, t: int) -> int:
        """Return the rows of one step; none beyond either end."""
        return self.starts[t + 1] - self.starts[t] if 0 <= t < self.num_steps else 0

    @functools.cached_property
    def ends(self) -> Tensor:
        """Return the row of the last step of each sequence: [B], on the CPU."""
        steps = range(self.num_steps)
        return torch.tensor(
            [self.starts[t] + b for t in reversed(steps) for b in range(self.step_rows(t + 1), self.step_rows(t))]
        )


@dataclass(frozen=True)
class Course:
    """The steps of a layout in the order in which one direction processes them, cut into chunks."""

    layout: Layout
    reverse: bool
    chunk_steps: int

    @property
    def batch(self) -> int:
        """Return B."""
        return self.layout.batch

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Return the fewest chunks of at most `chunk_steps`, all about as long, in the order of processing."""
        count = -(-self.layout.num_steps // self.chunk_steps)
        bounds = [self.layout.num_steps * place // count for place in range(count + 1)]
        spans = list(itertools.pairwise(bounds))
        if self.reverse:
            spans.reverse()
        starts = self.layout.starts
        return tuple(Chunk(i, b, e, slice(starts[b], starts[e])) for i, (b, e) in enumerate(spans))

    @functools.cached_property
    def most_rows(self) -> int:
        """Return the rows of the largest chunk."""
        return max(chunk.num_rows for chunk in self.chunks)

    def is_dense(self, chunk: Chunk) -> bool:
        """Return whether every step of a chunk has the whole batch."""
        return chunk.num_rows == (chunk.end - chunk.begin) * self.batch

    def struct(self, chunk: Chunk, weights: int) -> StepsStruct:
        """Return what the kernels are told about a chunk, whose steps each multiply all rows by so many weights."""
        return StepsStruct(
            offsets=ctypes.addressof(self.layout.offsets),
            num_steps=self.layout.num_steps,
            reverse=int(self.reverse),
            begin=chunk.begin,
            end=chunk.end,
            threads=threads_for(2.0 * self.batch * weights),
        )

    def before(self, t: int) -> int:
        """Return the step that is processed before step `t`; beyond either end there is none."""
        return t + 1 if self.reverse else t - 1

    def step_before(self, chunk: Chunk) -> slice:
        """Return the rows of the step that is processed before a chunk; none at the start."""
        t = self.before(chunk.end - 1 if self.reverse else chunk.begin)
        first = self.layout.starts[t] if self.layout.step_rows(t) else 0
        return slice(first, first + self.layout.step_rows(t))

    def state_before(self, states: Tensor, first: Tensor, chunk: Chunk) -> Tensor:
        """Return the states [rows, H] of the step before a chunk; the first ones [B, H] at the start."""
        return states[self.step_before(chunk)] if chunk.index else first

    def rows_before(self, y: Tensor, h0: Tensor, chunk: Chunk) -> Tensor:
        """Return h before each row of a chunk: `y` [rows, P] one step earlier, or `h0` [B, P] where a sequence starts.

        A view of `y` where every step of the chunk and the one before have equally many rows, else a copy.
        """
        pieces = [y[rows] if starts_earlier else h0[rows] for starts_earlier, rows in self._pieces_before[chunk.index]]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else y[chunk.rows]

    @functools.cached_property
    def _pieces_before(self) -> tuple[tuple[tuple[bool, slice], ...], ...]:
        """For each chunk, what is before its rows: rows of y (True), and of h0 where sequences start."""
        return tuple(tuple(self._pieces_before_chunk(chunk)) for chunk in self.chunks)

    def _pieces_before_chunk(self, chunk: Chunk) -> Iterator[tuple[bool, slice]]:
        layout, begin = self.layout, chunk.begin
        while begin < chunk.end:
            many, before = layout.step_rows(begin), layout.step_rows(self.before(begin))
            continuing = min(many, before)
            end = begin + 1
            if many == before:
                while end < chunk.end and many == layout.step_rows(end) == layout.step_rows(self.before(end)):
                    end += 1
            first = layout.starts[self.before(begin)] if continuing else 0
            if continuing:
                yield True, slice(first, first + (end - begin - 1) * many + continuing)
            if continuing < many:
                yield False, slice(continuing, many)
            begin = end

    def last_rows(self, y: Tensor) -> Tensor:
        """Return h after the last processed step of every sequence: [B, P] copied from `y` [rows, P]."""
        layout = self.layout
        if self.reverse or layout.num_rows == layout.num_steps * layout.batch:
            start = 0 if self.reverse else layout.num_rows - layout.batch
            return y[start : start + layout.batch].clone()
        return y[layout.ends]


def courses_of(x: Tensor, batch_sizes: Tensor | None, directions: int, chunk_steps: int) -> tuple[Course, ...]:
    """Return the course of each direction over padded input [T, B, I], or packed input [rows, I] with its sizes [T].

    Raises:
        RuntimeError: the sizes are not those of sequences in order of their lengths, or of another number of rows.
    """
    if batch_sizes is None:
        return _padded_courses(x.shape[0], x.shape[1], directions, chunk_steps)
    courses = _packed_courses(tuple(batch_sizes.tolist()), directions, chunk_steps)
    if courses[0].layout.num_rows != x.shape[0]:
        raise RuntimeError(f"batch_sizes add up to {courses[0].layout.num_rows} rows, but the input has {x.shape[0]}")
    return courses


# The layers of a model, and their forwards and backwards, share what is worked out for a batch.
@functools.lru_cache(maxsize=64)
def _packed_courses(sizes: tuple[int, ...], directions: int, chunk_steps: int) -> tuple[Course, ...]:
    if min(sizes) < 0 or any(later > size for size, later in itertools.pairwise(sizes)):
        raise RuntimeError(f"batch_sizes must not grow from step to step, nor be negative, got {list(sizes)}")
    return _courses(Layout((0, *itertools.accumulate(sizes)), sizes[0]), directions, chunk_steps)


@functools.lru_cache(maxsize=64)
def _padded_courses(num_steps: int, batch: int, directions: int, chunk_steps: int) -> tuple[Course, ...]:
    return _courses(Layout(tuple(t * batch for t in range(num_steps + 1)), batch), directions, chunk_steps)


def _courses(layout: Layout, directions: int, chunk_steps: int) -> tuple[Course, ...]:
    return tuple(Course(layout, d == 1, chunk_steps) for d in range(directions))


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
