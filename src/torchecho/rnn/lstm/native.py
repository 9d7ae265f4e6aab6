"""One LSTM layer by the C++ kernels, chunk by chunk: forward, and backward from any of the stash modes."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from torchecho.rnn import gemm
from torchecho.rnn.direction import OneDirection
from torchecho.rnn.floats import floats_of, give_back, is_rounded, window_of
from torchecho.rnn.gradients import CellGradients, WeightGradients
from torchecho.rnn.library import Struct, call, has_pairs, numbers, pointer
from torchecho.rnn.sequence import Chunk, StepsStruct
from torchecho.rnn.weights import Weights

_KEEP = {"gates": 1, "preact": 2}


class _Forward(Struct):
    _fields_ = [  # noqa: RUF012 - ctypes asks for a plain list
        ("steps", StepsStruct),
        *numbers("hidden output gates keep recurrent projection unprojected h0 cell cells y y_stride is_bfloat16"),
    ]


class _RebuildStruct(Struct):
    _fields_ = [("steps", StepsStruct), *numbers("hidden gates gates_stride cell_before c0 cells is_bfloat16")]  # noqa: RUF012 - as above


class _Backward(Struct):
    _fields_ = [  # noqa: RUF012 - as above
        ("steps", StepsStruct),
        *numbers("hidden output gates gates_stride cells cell_before c0 recurrent recurrent_stride projection"),
        *numbers("dy dy_stride dh_last dcell dgates_after dgates dgates_stride dgates_start dh unprojected"),
    ]


@dataclass(frozen=True)
class Direction(OneDirection):
    """One direction of one layer, and everything that both its passes read."""

    stash: str
    c0: Tensor  # [B, H]
    gates: Tensor  # [rows, 4H], or empty
    cells: Tensor  # [rows, H], or [chunks, B, H], or empty

    @property
    def units(self) -> int:
        """Return H."""
        return self.c0.shape[1]

    def with_floats(self) -> Self:
        """Return it with weights and first states in float32, states in one piece."""
        return replace(super().with_floats(), c0=self.c0.float().contiguous())


def forward(d: Direction) -> tuple[Tensor, Tensor]:
    """Write y and the stash; return the last h [B, P] and c [B, H]."""
    d = d.with_floats()
    H, w = d.units, d.weights
    pairs, bias = has_pairs(d.y.dtype), d.bias
    input_weight, recurrent = gemm.pack(w.input, pairs=pairs), gemm.pack(w.hidden, parts=4, pairs=pairs)
    projection = None if w.projection is None else gemm.pack(w.projection)
    unprojected = d.c0.new_empty(d.course.batch, H) if projection else None
    cell, chunks = d.c0.clone(), d.course.chunks
    in_place = d.stash in _KEEP and d.gates.dtype == torch.float32
    scratch = None if in_place else cell.new_empty(d.course.most_rows, 4 * H)
    arguments = _Forward(
        hidden=H,
        output=d.y.shape[1],
        keep=_KEEP.get(d.stash, 0),
        recurrent=pointer(recurrent.data),
        projection=pointer(projection.data) if projection else 0,
        unprojected=pointer(unprojected),
        h0=pointer(d.h0),
        cell=pointer(cell),
        is_bfloat16=is_rounded(d.y),
    )
    for chunk in chunks:
        gates = d.gates[chunk.rows] if scratch is None else scratch[: chunk.num_rows]
        gemm.product(gates, floats_of(d.x, chunk), input_weight, bias=bias)
        y = window_of(d.y, d.course, chunk)
        if d.stash in ("preact", "lean"):
            d.cells[chunk.index].copy_(cell)
        arguments.steps = d.steps(chunk)
        arguments.gates, arguments.y, arguments.y_stride = pointer(gates), y.at, y.stride
        arguments.cells = pointer(d.cells[chunk.rows]) if d.stash in ("gates", "cell") else 0
        call("lstm_forward", arguments)
        y.give_back(chunk)
        if d.stash in _KEEP and not in_place:
            d.gates[chunk.rows].copy_(gates)
        del y  # gone before the next chunk makes its own
    return d.course.last_rows(d.y), cell


def backward(d: Direction, g: CellGradients) -> WeightGradients:
    """Return the gradients of the weights, and write those of x, h0 and c0 to `g`."""
    dtype, d = d.weights.input.dtype, d.with_floats()
    w, chunks, pairs = d.weights, d.course.chunks, has_pairs(d.y.dtype)
    rebuild = _Rebuild.of(w, d.bias, pairs=pairs) if d.stash in ("cell", "lean") else None
    recurrent = gemm.for_steps(w.hidden, num_rows=d.y.shape[0], pairs=pairs)
    recurrent_at, recurrent_stride = gemm.right_struct(recurrent)
    input_weight = None if g.dx is None else gemm.right(w.input, pairs=pairs)
    projection = None if w.projection is None else gemm.pack_rows(w.projection)
    space = _Space.of(d)
    total = WeightGradients.of(w)
    dh, dc = g.dh.float(), g.dc.float()
    arguments = _Backward(
        hidden=d.units,
        output=d.y.shape[1],
        c0=pointer(d.c0),
        recurrent=recurrent_at,
        recurrent_stride=recurrent_stride,
        projection=pointer(projection.data) if projection else 0,
        dh_last=pointer(dh),
        dcell=pointer(dc),
        dgates_after=pointer(space.after),
        dgates=pointer(space.dgates),
        dgates_stride=space.dgates.stride(0),
        dgates_start=pointer(space.start),
        dh=pointer(space.dh),
        unprojected=pointer(space.unprojected),
    )
    for chunk in reversed(chunks):
        first = chunk is chunks[-1]
        x, h_before = floats_of(d.x, chunk), d.course.rows_before(d.y, d.h0, chunk).float()
        dgates = space.dgates[: chunk.num_rows]
        gates, cells, cell_before = _restore(d, rebuild, chunk, (x, h_before), space)
        dy = floats_of(g.dy, chunk)
        arguments.steps = d.steps(chunk)
        arguments.gates, arguments.gates_stride = pointer(gates), gates.stride(0)
        arguments.cells, arguments.cell_before = pointer(cells), pointer(cell_before)
        arguments.dy, arguments.dy_stride = pointer(dy), dy.stride(0)
        call("lstm_backward", arguments)
        if input_weight is not None:
            g.give_dx(chunk.rows, dgates, input_weight)
        total.add(dgates, x, h_before, first=first, pairs=pairs)
        if total.projection is not None:
            dprojected, unprojected = space.of_projection(chunk)
            gemm.product(total.projection, dprojected.t(), unprojected, accumulate=not first)
        del x, h_before, gates, cells, cell_before, dy  # gone before the next chunk makes its own
    if total.hidden_bias is not None and total.input_bias is not None:
        total.hidden_bias.copy_(total.input_bias)
    if g.needs_dh0:
        gemm.product(dh, space.start, w.hidden)
        give_back(g.dh, dh)
    give_back(g.dc, dc)
    return total.to(dtype)


@dataclass(frozen=True)
class _Space:
    """Scratch of a backward pass; rows are those of the largest chunk."""

    dgates: Tensor  # [rows, 4H]
    cells: Tensor | None  # [rows, H]
    after: Tensor  # [B, 4H]: gradients at the step after the chunk
    start: Tensor  # [B, 4H]: gradients at the first step of every sequence
    dh: Tensor | None  # [rows, P]
    unprojected: Tensor | None  # [rows, H]

    @staticmethod
    def of(d: Direction) -> "_Space":
        """Make room for what a direction needs."""
        B, H, rows, projected = d.course.batch, d.units, d.course.most_rows, d.weights.projection is not None
        return _Space(
            dgates=gemm.spaced_rows(d.c0, rows, 4 * H),
            cells=d.c0.new_empty(rows, H) if d.stash in ("preact", "lean") else None,
            after=d.c0.new_empty(B, 4 * H),
            start=d.c0.new_empty(B, 4 * H),
            dh=d.c0.new_empty(rows, d.y.shape[1]) if projected else None,
            unprojected=d.c0.new_empty(rows, H) if projected else None,
        )

    def of_projection(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the gradient of the projected h of a chunk, and what was projected."""
        assert self.dh is not None, "there is room where a layer projects"
        assert self.unprojected is not None, "as above"
        return self.dh[: chunk.num_rows], self.unprojected[: chunk.num_rows]


@dataclass(frozen=True)
class _Rebuild:
    """The operands that rebuild the gates of a chunk before activation: two products for all its steps."""

    input: gemm.Packed
    hidden: gemm.Packed
    bias: Tensor | None

    @staticmethod
    def of(weights: Weights, bias: Tensor | None, *, pairs: bool) -> "_Rebuild":
        """Pack the weights of a direction."""
        return _Rebuild(gemm.pack(weights.input, pairs=pairs), gemm.pack(weights.hidden, pairs=pairs), bias)


def _restore(
    d: Direction, rebuild: _Rebuild | None, chunk: Chunk, read: tuple[Tensor, Tensor], space: _Space
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activated gates, the cells, and the cells before the chunk, from whatever was stashed.

    `read` is what the steps of the chunk read: x, and h before each.
    """
    if d.stash == "gates":
        return d.gates[chunk.rows].float(), d.cells[chunk.rows], d.course.state_before(d.cells, d.c0, chunk)
    gates = space.dgates[: chunk.num_rows]
    if rebuild is None:
        gates.copy_(d.gates[chunk.rows])
    else:
        x, h_before = read
        gemm.product(gates, x, rebuild.input, bias=rebuild.bias)
        # the sums of the forward's steps, so that every mode has the same bits
        gemm.product(gates, h_before, rebuild.hidden, accumulate=True, by_kernels_only=True)
    whole = d.stash == "cell"
    cells = d.cells[chunk.rows] if space.cells is None else space.cells[: chunk.num_rows]
    before = d.course.state_before(d.cells, d.c0, chunk) if whole else d.cells[chunk.index]
    arguments = _RebuildStruct(
        steps=d.steps(chunk),
        hidden=d.units,
        gates=pointer(gates),
        gates_stride=gates.stride(0),
        cell_before=pointer(before),
        c0=pointer(d.c0),
        cells=0 if whole else pointer(cells),
        is_bfloat16=is_rounded(d.y),
    )
    call("lstm_rebuild", arguments)
    return gates, cells, before
