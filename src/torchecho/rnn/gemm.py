"""Matrix products for whole chunks of a sequence, with right operands packed once and used for many chunks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchecho.rnn.library import Struct, call, call_numbers, numbers, pointer


@dataclass(frozen=True)
class Panels:
    """A packed right operand of `depth` rows and `columns` columns (of each part)."""

    data: Tensor
    depth: int
    columns: int


class _Product(Struct):
    _fields_ = numbers("left row_stride depth_stride panels bias out out_stride rows depth columns accumulate")


def pack_rows(matrix: Tensor) -> Panels:
    """Pack `matrix` [depth, columns] as the right operand of ``left @ matrix``."""
    matrix = unit_columns(matrix)
    depth, columns = matrix.shape
    data = _space(matrix, depth, columns, 1)
    threads = torch.get_num_threads()
    call_numbers("pack_rows", (pointer(matrix), matrix.stride(0), depth, columns, pointer(data), threads))
    return Panels(data, depth, columns)


def pack_transposed(matrix: Tensor, parts: int = 1) -> Panels:
    """Pack `matrix` [parts * columns, depth] as the right operand of ``left @ matrix.T``.

    With several parts (the gates of a cell) a panel holds one vector of each part, as the kernels of steps want it.
    """
    matrix = unit_columns(matrix)
    columns, depth = matrix.shape[0] // parts, matrix.shape[1]
    data = _space(matrix, depth, columns, parts)
    threads = torch.get_num_threads()
    values = (pointer(matrix), matrix.stride(0), depth, columns, parts, pointer(data), threads)
    call_numbers("pack_transposed", values)
    return Panels(data, depth, columns)


def multiply(out: Tensor, left: Tensor, right: Panels, *, bias: Tensor | None = None, accumulate: bool = False) -> None:
    """Write ``left @ right + bias`` to `out` [rows, columns], or add it to what is there.

    `left` may have any strides: a transposed view costs no copy.
    """
    rows, depth = left.shape
    assert (depth, out.shape[1]) == (right.depth, right.columns)
    assert out.stride(1) == 1 or out.shape[1] == 1
    product = _Product(
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
    call("multiply", product, torch.get_num_threads())


def unit_columns(matrix: Tensor) -> Tensor:
    """Return the matrix with neighbouring elements of a row side by side, copied only if they are not."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _space(like: Tensor, depth: int, columns: int, parts: int) -> Tensor:
    return like.new_empty(call_numbers("panels_size", (depth, columns, parts)))
