"""Matrix products of whole chunks: by the kernels' own packed product, or by PyTorch's BLAS where that is faster.

Which of the two is measured once for a shape and kept in the cache folder. Measuring decides between roundings, so two
machines, or numbers of threads, may differ in the last bits of a gradient, as they may with PyTorch's own products.

A layer of bfloat16 multiplies pairs where these are faster (cpp/pairs.h): its right operands are packed so. x, h and
the weights lose nothing by that; gradients of gates are rounded, as PyTorch's own layers round them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchecho.rnn import backends
from torchecho.rnn.library import Struct, call, call_numbers, numbers, pointer, threads_for

_TIME_DEPTH = 128  # as in cpp/tile.h
_FLOPS_A_MOVE = 16.0  # that take as long as a float on its way from memory to memory
_LINE = 16  # floats of a line of a cache
_PACKED, _PAIRED = 0, -1  # in place of a stride, as in cpp/tile.h


@dataclass(frozen=True)
class Packed:
    """A right operand [depth, parts * columns], packed for the kernels: floats, or pairs of bfloat16."""

    matrix: Tensor | None  # [depth, parts * columns] for BLAS; None if only the kernels read it
    data: Tensor
    pairs: bool


Right = Tensor | Packed


class ProductStruct(Struct):
    """The kernels' view of a product."""

    _fields_ = numbers(
        "left row_stride depth_stride right right_stride bias out out_stride rows depth columns accumulate"
    )


def pack(matrix: Tensor, parts: int = 1, *, pairs: bool = False) -> Packed:
    """Pack the transpose of `matrix` [parts * columns, depth] as a right operand.

    With several parts (the gates of a cell), a panel holds one vector of each, as the kernels of steps want it.
    """
    matrix = rows_in_memory(matrix)
    columns, depth = matrix.shape[0] // parts, matrix.shape[1]
    data = _room_for_panels(matrix, depth, columns, parts, pairs=pairs)
    threads = threads_for(_FLOPS_A_MOVE * depth * columns * parts)
    sizes = (matrix.stride(0), depth, columns, parts, int(pairs))
    call_numbers("pack_transposed", pointer(matrix), *sizes, pointer(data), threads)
    return Packed(None if pairs else matrix.t(), data, pairs)


def pack_rows(matrix: Tensor, begin: int = 0, *, pairs: bool = False) -> Packed:
    """Pack `matrix` [depth, columns], its rows from `begin` on first, as a right operand that only the kernels read."""
    matrix = rows_in_memory(matrix)
    depth, columns = matrix.shape
    data = _room_for_panels(matrix, depth, columns, 1, pairs=pairs)
    threads = threads_for(_FLOPS_A_MOVE * depth * columns)
    sizes = (matrix.stride(0), depth, columns, begin, int(pairs))
    call_numbers("pack_rows", pointer(matrix), *sizes, pointer(data), threads)
    return Packed(None, data, pairs)


def are_packed_for_steps(depth: int, num_rows: int, *, pairs: bool) -> bool:
    """Return whether a copy of `depth` rows of weights is no larger than an output of `num_rows` rows, or in pairs."""
    return pairs or depth <= num_rows


def for_steps(matrix: Tensor, *, num_rows: int, pairs: bool) -> Right:
    """Return `matrix` [depth, columns] as the operand of every step of a backward, for the kernels.

    Packed it is read faster, but a copy is held, which `are_packed_for_steps` limits; `num_rows` are the output's.
    """
    packed = are_packed_for_steps(matrix.shape[0], num_rows, pairs=pairs)
    return pack_rows(matrix, pairs=pairs) if packed else rows_in_memory(matrix)


def right(matrix: Tensor, *, pairs: bool) -> Right:
    """Return `matrix` [depth, columns], its rows in memory, as an operand of one product: packed in pairs only."""
    return pack_rows(matrix, pairs=True) if pairs else rows_in_memory(matrix)


def _room_for_panels(like: Tensor, depth: int, columns: int, parts: int, *, pairs: bool) -> Tensor:
    return like.new_empty(call_numbers("panels_size", -(-depth // 2) if pairs else depth, columns, parts))


def product(
    out: Tensor,
    left: Tensor,
    right: Right,
    *,
    bias: Tensor | None = None,
    accumulate: bool = False,
    by_kernels_only: bool = False,
) -> None:
    """Write ``left @ right + bias`` to `out`, or add it to what is there.

    Args:
        out: [rows, columns], neighbouring elements of a row side by side.
        left: [rows, depth] of any strides: a transposed view costs no copy.
        right: [depth, columns], read where it is if neighbouring elements of a row are side by side; or packed. By
            pairs `left` is rounded to bfloat16.
        bias: [columns] or none; not together with `accumulate`.
        accumulate: Add to `out`.
        by_kernels_only: Sum as the kernels of steps do, to the last bit, whatever is the fastest.
    """
    way: backends.Product = _multiply
    if not (by_kernels_only or (isinstance(right, Packed) and right.matrix is None)):
        (rows, depth), transposed = left.shape, (left.stride(1) != 1, isinstance(right, Packed))
        shape = backends.Shape(rows, depth, out.shape[1], transposed, torch.get_num_threads())
        way = backends.choose(shape, out, _WAYS, (left, right, bias))
    way(out, left, right, bias, accumulate)


def _by_blas(out: Tensor, left: Tensor, right: Right, bias: Tensor | None, accumulate: bool) -> None:  # noqa: FBT001 - as all ways
    plain = right.matrix if isinstance(right, Packed) else right
    assert plain is not None, "only the kernels read what has no matrix"
    if left.stride(1) != 1:
        _add_pieces(out, left, plain, add=accumulate)
    elif accumulate:
        out.addmm_(left, plain)
    elif bias is None:
        torch.mm(left, plain, out=out)
    else:
        torch.addmm(bias, left, plain, out=out)


def _add_pieces(to: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    """Write or add a product in pieces of its depth: along time many terms have one sign, and one long sum rounds more.

    PyTorch adds step by step; one sum over 600 rows had five times the error of that.
    """
    for begin in range(0, left.shape[1], _TIME_DEPTH):
        pieces = left[:, begin : begin + _TIME_DEPTH], right[begin : begin + _TIME_DEPTH]
        if begin or add:
            to.addmm_(*pieces)
        else:
            torch.mm(*pieces, out=to)


class _RowSumStruct(Struct):
    _fields_ = numbers("rows stride count columns to accumulate")


def sum_rows(out: Tensor, rows: Tensor, *, accumulate: bool) -> None:
    """Write the sum of `rows` [count, columns], elements of a row side by side, to `out` [columns], or add it."""
    count, columns = rows.shape
    arguments = _RowSumStruct(
        rows=pointer(rows),
        stride=rows.stride(0),
        count=count,
        columns=columns,
        to=pointer(out),
        accumulate=int(accumulate),
    )
    call("sum_rows", arguments, threads_for(_FLOPS_A_MOVE * count * columns))


def rows_in_memory(matrix: Tensor) -> Tensor:
    """Return the matrix with the elements of a row side by side and rows apart, copied only if they are not."""
    good = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
    return matrix if good else matrix.contiguous()


def row_stride(columns: int) -> int:
    """Return how far apart rows of scratch should lie, in floats, whose columns are read as a transposed operand.

    Rows a multiple of 512 bytes apart have their first lines in an eighth of the sets of a cache, or fewer: a column of
    them does not stay there.
    """
    return columns + _LINE if columns % (8 * _LINE) == 0 else columns


def spaced_rows(like: Tensor, rows: int, columns: int) -> Tensor:
    """Return scratch [rows, columns] with rows `row_stride` apart, not written yet."""
    return like.new_empty(rows, row_stride(columns))[:, :columns]


def right_struct(right: Right) -> tuple[int, int]:
    """Return what the kernels are told about a right operand: where it is, and the stride of its rows if not packed."""
    if isinstance(right, Packed):
        return pointer(right.data), _PAIRED if right.pairs else _PACKED
    return pointer(right), max(right.stride(0), 1)


def _multiply(out: Tensor, left: Tensor, right: Right, bias: Tensor | None, accumulate: bool) -> None:  # noqa: FBT001 - as all ways
    (rows, depth), (row_stride, depth_stride) = left.shape, left.stride()
    columns, (out_stride, neighbour) = out.shape[1], out.stride()
    assert neighbour == 1 or columns == 1
    if not isinstance(right, Packed):
        right = rows_in_memory(right)
    elif right.pairs and 1 not in (row_stride, depth_stride):
        left = left.contiguous()
        row_stride, depth_stride = left.stride()
    at, stride = right_struct(right)
    arguments = ProductStruct(
        left=pointer(left),
        row_stride=row_stride,
        depth_stride=depth_stride,
        right=at,
        right_stride=stride,
        bias=pointer(bias),
        out=pointer(out),
        out_stride=out_stride,
        rows=rows,
        depth=depth,
        columns=columns,
        accumulate=accumulate,
    )
    call("multiply", arguments, threads_for(2.0 * rows * depth * columns))


_WAYS: Mapping[str, backends.Product] = {"kernels": _multiply, "blas": _by_blas}
