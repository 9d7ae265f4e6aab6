"""Matrix products of whole chunks: by the kernels' own packed product, or by PyTorch's BLAS where that is faster.

Which of the two is measured once for a shape and kept in the cache folder. Measuring decides between roundings, so two
machines, or numbers of threads, may differ in the last bits of a gradient, as they may with PyTorch's own products.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchecho.rnn import backends
from torchecho.rnn.library import Struct, call, call_numbers, numbers, pointer


@dataclass(frozen=True)
class Panels:
    """A packed right operand of `depth` rows and `columns` columns (of each part)."""

    data: Tensor
    depth: int
    columns: int


class PanelSpace:
    """Memory for one packed operand at a time: packing anew for each chunk is cheap, holding every weight twice is not."""

    def __init__(self, like: Tensor) -> None:
        self._data = like.new_empty(0)

    def take(self, elements: int) -> Tensor:
        """Return memory for `elements` floats; what was taken before is lost."""
        if self._data.numel() < elements:
            self._data = self._data.new_empty(0)  # free the old before the new
            self._data = self._data.new_empty(elements)
        return self._data


class ProductStruct(Struct):
    """The kernels' view of a product."""

    _fields_ = numbers("left row_stride depth_stride panels bias out out_stride rows depth columns accumulate")


def product(  # noqa: PLR0913 - what a GEMM has
    out: Tensor, left: Tensor, right: Tensor, space: PanelSpace, *, bias: Tensor | None = None, accumulate: bool = False
) -> None:
    """Write ``left @ right + bias`` to `out`, or add it to what is there.

    Args:
        out: [rows, columns], neighbouring elements of a row side by side.
        left: [rows, depth] of any strides: a transposed view costs no copy.
        right: [depth, columns]; it or its transpose has neighbouring elements side by side, else it is copied.
        space: Where the right operand is packed.
        bias: [columns] or none.
        accumulate: Add to `out`.
    """
    def by_panels(to: Tensor, *, add: bool) -> None:
        multiply(to, left, pack(right, space=space), bias=bias, accumulate=add)

    def by_blas(to: Tensor, *, add: bool) -> None:
        if add:
            to.addmm_(left, right)
        elif bias is None:
            torch.mm(left, right, out=to)
        else:
            torch.addmm(bias, left, right, out=to)

    rows, depth, columns = *left.shape, right.shape[1]
    transposed = (left.stride(1) != 1, right.stride(1) != 1)
    shape = backends.Shape(rows, depth, columns, transposed, torch.get_num_threads())
    fast = backends.choose(shape, out, {"panels": by_panels, "blas": by_blas})
    fast(out, add=accumulate)


def pack(right: Tensor, parts: int = 1, space: PanelSpace | None = None) -> Panels:
    """Pack a right operand [depth, parts * columns].

    Args:
        right: A matrix, or the transpose of one.
        parts: With several (the gates of a cell), a panel holds one vector of each, as the kernels of steps want it.
        space: Where to; memory of its own if None.
    """
    if 1 not in right.stride():
        right = right.contiguous()
    depth, columns = right.shape[0], right.shape[1] // parts
    elements = call_numbers("panels_size", (depth, columns, parts))
    data = right.new_empty(elements) if space is None else space.take(elements)
    threads = torch.get_num_threads()
    if right.stride(0) == 1:
        call_numbers("pack_transposed", (pointer(right), right.stride(1), depth, columns, parts, pointer(data), threads))
    else:
        assert parts == 1
        call_numbers("pack_rows", (pointer(right), right.stride(0), depth, columns, pointer(data), threads))
    return Panels(data, depth, columns)


def multiply(out: Tensor, left: Tensor, right: Panels, *, bias: Tensor | None = None, accumulate: bool = False) -> None:
    """Do as `product` with a right operand that is packed already."""
    rows, depth = left.shape
    assert (depth, out.shape[1]) == (right.depth, right.columns)
    assert out.stride(1) == 1 or out.shape[1] == 1
    arguments = ProductStruct(
        left=pointer(left),
        row_stride=left.stride(0),
        depth_stride=left.stride(1),
        panels=pointer(right.data),
        bias=pointer(bias),
        out=pointer(out),
        out_stride=out.stride(0),
        rows=rows,
        depth=depth,
        columns=right.columns,
        accumulate=int(accumulate),
    )
    call("multiply", arguments, torch.get_num_threads())
