"""Regions of a storage: what is told apart shares nothing, and rows, columns and blocks are told apart."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchecho.apply.overlap import Region, may_overlap

WHOLE = torch.zeros(6, 12)
GATES = WHOLE.unsafe_chunk(3, 1)


def region_of(tensor: torch.Tensor) -> Region:
    """Return what a tensor takes of its storage."""
    return Region(tensor.shape, tensor.stride(), int(tensor.storage_offset()))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (WHOLE[:3], WHOLE[3:]),
        (WHOLE[1], WHOLE[2]),
        *itertools.combinations(GATES, 2),
        (GATES[0][2:], GATES[2][:4]),
        (WHOLE[:, 3], WHOLE[:, 4:]),
        (WHOLE.view(2, 3, 12)[:, 1], WHOLE.view(2, 3, 12)[:, 2]),
        (WHOLE.view(6, 3, 4)[:, 1], WHOLE.view(6, 3, 4)[:, 2]),
        (WHOLE.t()[:4], WHOLE[:, 4:]),
        (WHOLE[:0], WHOLE),
    ],
)
def test_regions_apart(a: torch.Tensor, b: torch.Tensor) -> None:
    assert not may_overlap(region_of(a), region_of(b))
    assert not may_overlap(region_of(b), region_of(a))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (WHOLE, WHOLE),
        (WHOLE, WHOLE[2]),
        (WHOLE[:, 3], WHOLE[2]),
        (GATES[0], WHOLE.view(-1)[3:5]),
        (WHOLE[:4], WHOLE[3:]),
    ],
)
def test_regions_that_share(a: torch.Tensor, b: torch.Tensor) -> None:
    assert may_overlap(region_of(a), region_of(b))


def _elements(region: Region) -> set[int]:
    axes = [range(0, n * s, s) if s else [0] * min(n, 1) for n, s in zip(region.shape, region.strides, strict=True)]
    return {region.offset + sum(steps) for steps in itertools.product(*axes)}


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """Draw a region of up to three dimensions, of any strides."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = [draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24])) for _ in shape]
    return Region(shape, strides, draw(st.integers(0, 24)))


@given(regions(), regions())
def test_what_is_told_apart_shares_nothing(a: Region, b: Region) -> None:
    assert may_overlap(a, b) or _elements(a).isdisjoint(_elements(b))
