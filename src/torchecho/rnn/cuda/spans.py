"""The steps of a chunk as the time loop of a GPU takes them."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from torchecho.rnn.sequence import Chunk, Course

#: Elements of a step that one program of a kernel takes: small, so that a step of 64 x 512 fills a large GPU.
BLOCK = 256


@dataclass(frozen=True)
class Span:
    """One step: its rows within the chunk, and how many of them continue a sequence of the step processed before."""

    begin: int
    end: int
    continuing: int

    @property
    def num_rows(self) -> int:
        """Return the rows of the step."""
        return self.end - self.begin

    @property
    def rows(self) -> slice:
        """Return the rows of the step within its chunk."""
        return slice(self.begin, self.end)


Spans = tuple[Span, ...]


def spans_of(course: Course, chunk: Chunk) -> Spans:
    """Return the steps of a chunk in the order of processing."""
    layout, steps = course.layout, range(chunk.begin, chunk.end)
    first = layout.starts[chunk.begin]
    return tuple(
        Span(
            layout.starts[t] - first,
            layout.starts[t + 1] - first,
            min(layout.step_rows(t), layout.step_rows(course.before(t))),
        )
        for t in (reversed(steps) if course.reverse else steps)
    )


def first_rows(spans: Spans, device: torch.device) -> Tensor:
    """Return three numbers of each step in the order of processing: first row, rows, and continuing ones.

    The tensor is [3, steps] int32. The numbers of a few chunks stay on the device, since each pass asks for them again.
    """
    if device.type != "cuda":
        return _first_rows(spans, device)
    return _kept_first_rows(spans, device)


def _first_rows(spans: Spans, device: torch.device) -> Tensor:
    numbers = [[span.begin for span in spans], [span.num_rows for span in spans], [span.continuing for span in spans]]
    return torch.tensor(numbers, dtype=torch.int32, device=device)


_kept_first_rows = functools.lru_cache(maxsize=64)(_first_rows)
