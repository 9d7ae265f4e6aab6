"""Tell whether two tensors that look at one storage share elements."""

from collections.abc import Sequence
from typing import NamedTuple


class Region(NamedTuple):
    """The elements of a storage that a tensor looks at."""

    shape: Sequence[int]
    strides: Sequence[int]
    offset: int


def may_overlap(a: Region, b: Region) -> bool:
    """Return whether two regions of one storage may share an element; False is certain, True is not.

    Told apart are regions that lie one after the other, and columns or blocks that do so in every row: with rows of any
    stride of the two, both keep to places in the row that the other never takes.
    """
    if 0 in a.shape or 0 in b.shape:
        return False
    rows = {stride for stride in (*a.strides, *b.strides) if stride > 1}
    return not any(_apart(_places(a, row), _places(b, row), row) for row in (_longest(a, b), *rows))


def _longest(a: Region, b: Region) -> int:
    """Return a row that holds both regions whole."""
    return 1 + max(r.offset + sum((n - 1) * s for n, s in zip(r.shape, r.strides, strict=True)) for r in (a, b))


def _places(region: Region, row: int) -> tuple[int, int]:
    """Return the first and the last place that a region takes in a row; the last lies beyond the row if it wraps."""
    first = region.offset % row
    within = ((n - 1) * s for n, s in zip(region.shape, region.strides, strict=True) if s % row)
    return first, first + sum(within)


def _apart(a: tuple[int, int], b: tuple[int, int], row: int) -> bool:
    return max(a[1], b[1]) < row and (a[1] < b[0] or b[1] < a[0])
