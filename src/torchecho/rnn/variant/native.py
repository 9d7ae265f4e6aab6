"""One layer of an LSTM variant by the C++ kernels, chunk by chunk: forward, and backward from either stash mode."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchecho.rnn import gemm
from torchecho.rnn.gradients import CellGradients
from torchecho.rnn.library import Struct, call, numbers, pointer
from torchecho.rnn.sequence import Chunk, Course, StepsStruct, rows_of
from torchecho.rnn.variant.cell import Noise, Variant, VariantWeights, row_places


class _CellStruct(Struct):
    _fields_ = numbers("hidden gates norm_x norm_h bias norm_c shift_c peephole drop zone_c zone_h zone output")


class _Forward(Struct):
    _fields_ = [  # noqa: RUF012 - ctypes asks for a plain list
        ("steps", StepsStruct),
        ("cell", _CellStruct),
        *numbers("recurrent inputs product whole statistics scratch c cells h dropped y y_stride"),
        *numbers("projection unprojected"),
    ]


class _Backward(Struct):
    _fields_ = [  # noqa: RUF012 - as above
        ("steps", StepsStruct),
        ("cell", _CellStruct),
        *numbers("recurrent recurrent_stride gates inputs product statistics cells cell_before c0"),
        *numbers("dy dy_stride dh dc"),
        *numbers("dgates dproduct dproduct_after dproduct_start scratch sums"),
        *numbers("projection dprojected unprojected dunprojected"),
    ]


@dataclass(frozen=True)
class Kept:
    """The stash of one direction; tensors that a mode or a variant has no use for are empty."""

    gates: Tensor  # [rows, G * H], activated; if they are normalised, what they are made of is kept instead:
    inputs: Tensor  # [rows, G * H], the product of the input
    products: Tensor  # [rows, G * H], that of h
    statistics: Tensor  # [rows, 4], mean and 1 / standard deviation of the one and of the other
    cells: Tensor  # [rows, H], or [chunks, B, H] before each chunk

    def of_chunk(self, chunk: Chunk) -> "Kept":
        """Return what a stash of all rows has of a chunk's."""
        return Kept(*(t[chunk.rows] for t in (self.gates, self.inputs, self.products, self.statistics, self.cells)))


@dataclass(frozen=True)
class Direction:
    """One direction of one layer, and everything that both its passes read."""

    course: Course
    stash: str
    variant: Variant
    noise: Noise
    x: Tensor  # [T, B, I] or [rows, I]
    h0: Tensor  # [B, P]
    c0: Tensor  # [B, H]
    weights: VariantWeights
    y: Tensor  # [rows, P], a slice of the layer's output
    kept: Kept

    @property
    def units(self) -> int:
        """Return H."""
        return self.c0.shape[1]

    @property
    def width(self) -> int:
        """Return G * H."""
        return self.variant.gates * self.units

    @property
    def is_normalised(self) -> bool:
        """Return whether both products are."""
        return self.weights.hidden_norm is not None

    def contiguous(self) -> "Direction":
        """Return it with the small tensors that the kernels read as rows in one piece."""
        w, n = self.weights, self.noise
        named = ("input_norm", "hidden_norm", "cell_norm", "cell_bias", "peephole")
        small: dict[str, Any] = {name: None if (t := getattr(w, name)) is None else t.contiguous() for name in named}
        drop = None if n.drop is None else n.drop.contiguous()
        return replace(
            self,
            weights=replace(w, **small),
            noise=replace(n, drop=drop),
            h0=self.h0.contiguous(),
            c0=self.c0.contiguous(),
        )

    def steps(self, chunk: Chunk) -> StepsStruct:
        """Return what the kernels are told about the steps of a chunk."""
        return self.course.struct(chunk, self.weights.hidden.numel())

    def cell(self, chunk: Chunk) -> _CellStruct:
        """Return what the kernels are told about the cell."""
        w, noise = self.weights, self.noise
        masks = [None if m is None else m[chunk.rows] for m in (noise.zone_cell, noise.zone_hidden)]
        return _CellStruct(
            hidden=self.units,
            gates=self.variant.gates,
            norm_x=pointer(w.input_norm),
            norm_h=pointer(w.hidden_norm),
            bias=pointer(self.bias),
            norm_c=pointer(w.cell_norm),
            shift_c=pointer(w.cell_bias),
            peephole=pointer(w.peephole),
            drop=pointer(noise.drop),
            zone_c=pointer(masks[0]),
            zone_h=pointer(masks[1]),
            zone=pointer(self.zone),
            output=self.y.shape[1],
        )

    @functools.cached_property
    def bias(self) -> Tensor | None:
        """Return the sum of both biases in one piece."""
        bias = self.weights.bias
        return None if bias is None else bias.contiguous()

    @functools.cached_property
    def zone(self) -> Tensor:
        """Return the zoneout of c and h where there is no mask."""
        return self.c0.new_tensor([self.variant.zoneout_cell, self.variant.zoneout_hidden])


def forward(d: Direction) -> tuple[Tensor, Tensor]:
    """Write y and the stash; return the last h [B, P] and c [B, H]."""
    d = d.contiguous()
    B, kept = d.course.batch, d.kept
    whole, chunks = d.stash == "gates", d.course.chunks
    input_weight, recurrent = gemm.pack(d.weights.input), gemm.pack(d.weights.hidden, parts=d.variant.gates)
    h, c = d.h0.clone(), d.c0.clone()
    dropped = h if d.noise.drop is None else h * d.noise.drop
    stashed = kept.inputs if d.is_normalised else kept.gates
    all_inputs = stashed if whole else d.x.new_empty(d.course.most_rows, d.width)
    products = None if whole and d.is_normalised else d.x.new_empty(B, d.width)
    of_row = d.x.new_empty(torch.get_num_threads(), d.width) if d.is_normalised else None
    projection = None if d.weights.projection is None else gemm.pack(d.weights.projection)
    unprojected = None if projection is None else d.x.new_empty(B, d.units)
    for chunk in chunks:
        inputs = all_inputs[chunk.rows if whole else slice(chunk.num_rows)]
        gemm.product(inputs, rows_of(d.x, chunk), input_weight, bias=None if d.is_normalised else d.bias)
        if d.stash == "lean":
            kept.cells[chunk.index].copy_(c)
        arguments = _Forward(
            steps=d.steps(chunk),
            cell=d.cell(chunk),
            recurrent=pointer(recurrent.data),
            inputs=pointer(inputs),
            product=pointer(kept.products[chunk.rows] if products is None else products),
            whole=int(products is None),
            statistics=pointer(kept.statistics[chunk.rows]),
            scratch=pointer(of_row),
            c=pointer(c),
            cells=pointer(kept.cells[chunk.rows]) if whole else 0,
            h=pointer(h),
            dropped=pointer(dropped),
            y=pointer(d.y),
            y_stride=d.y.stride(0),
            projection=pointer(projection.data) if projection else 0,
            unprojected=pointer(unprojected),
        )
        call("variant_forward", arguments)
    return d.course.last_rows(d.y), c


@dataclass(frozen=True)
class _Projected:
    """The projection of h in a backward pass, and scratch that goes with it; rows are those of the largest chunk."""

    weight: gemm.Packed | None  # [P, H]; None without projection
    gradient: Tensor | None = None  # [rows, P], of the projected h
    unprojected: Tensor | None = None  # [rows, H]
    of_unprojected: Tensor | None = None  # [B, H], its gradient at one step

    @staticmethod
    def of(d: Direction, rows: int) -> "_Projected":
        """Make room for what a direction needs."""
        if d.weights.projection is None:
            return _Projected(None)
        sizes = ((rows, d.y.shape[1]), (rows, d.units), (d.course.batch, d.units))
        return _Projected(gemm.pack_rows(d.weights.projection), *(d.x.new_empty(size) for size in sizes))

    def pointers(self) -> dict[str, int]:
        """Return what the kernels are told."""
        return {
            "projection": pointer(self.weight.data) if self.weight else 0,
            "dprojected": pointer(self.gradient),
            "unprojected": pointer(self.unprojected),
            "dunprojected": pointer(self.of_unprojected),
        }

    def add_gradient(self, total: VariantWeights, rows: int, *, first: bool) -> None:
        """Add the gradient of the projection at the rows of a chunk, or write it if that is the first."""
        if total.projection is not None and self.gradient is not None and self.unprojected is not None:
            gemm.product(total.projection, self.gradient[:rows].t(), self.unprojected[:rows], accumulate=not first)


@dataclass(frozen=True)
class _Restored:
    """What the backward of a chunk reads, from the stash or rebuilt: what `gates` keeps of it, and c before it."""

    kept: Kept
    cell_before: Tensor


def backward(d: Direction, g: CellGradients) -> VariantWeights:
    """Return the gradients of the weights, and write those of x, h0 and c0 to `g`."""
    d = d.contiguous()
    w, H, B, width, chunks = d.weights, d.units, d.course.batch, d.width, d.course.chunks
    total, recurrent = w.empty(), gemm.for_steps(w.hidden, num_rows=d.y.shape[0], pairs=False)
    recurrent_at, recurrent_stride = gemm.right_struct(recurrent)
    rebuild = _Rebuild.of(d) if d.stash == "lean" else None
    threads = torch.get_num_threads()
    after, start = d.x.new_empty(B, width), d.x.new_empty(B, width)
    scratch, total_sums = d.x.new_empty(threads, width + 2 * H), d.x.new_zeros(3 * width + 5 * H)
    projected = _Projected.of(d, d.course.most_rows)
    for chunk in reversed(chunks):
        first = chunk is chunks[-1]
        h_before = _dropped(d.course.rows_before(d.y, d.h0, chunk), d, chunk)
        x, dy = rows_of(d.x, chunk), rows_of(g.dy, chunk)
        restored = _stashed(d, chunk) if rebuild is None else rebuild.run(d, chunk, x, h_before)
        dgates, dproduct = _room_for_gradients(d, chunk, restored.kept)
        sums = d.x.new_zeros(threads, total_sums.shape[0])  # of one chunk: short sums round less
        arguments = _Backward(
            steps=d.steps(chunk),
            cell=d.cell(chunk),
            recurrent=recurrent_at,
            recurrent_stride=recurrent_stride,
            gates=pointer(restored.kept.gates),
            inputs=pointer(restored.kept.inputs),
            product=pointer(restored.kept.products),
            statistics=pointer(restored.kept.statistics),
            cells=pointer(restored.kept.cells),
            cell_before=pointer(restored.cell_before),
            c0=pointer(d.c0),
            dy=pointer(dy),
            dy_stride=dy.stride(0),
            dh=pointer(g.dh),
            dc=pointer(g.dc),
            dgates=pointer(dgates),
            dproduct=pointer(dproduct),
            dproduct_after=pointer(after),
            dproduct_start=pointer(start),
            scratch=pointer(scratch),
            sums=pointer(sums),
            **projected.pointers(),
        )
        call("variant_backward", arguments)
        gemm.product(total.hidden, dproduct.t(), h_before, accumulate=not first)
        projected.add_gradient(total, chunk.num_rows, first=first)
        total_sums += sums.sum(0)
        gemm.product(total.input, dgates.t(), x, accumulate=not first)
        if g.dx is not None:
            g.give_dx(chunk.rows, dgates, w.input)
        del x, h_before, dy, dgates, dproduct, restored, arguments  # gone before the next chunk makes its own
    _write_small(total, total_sums, width, H)
    if g.needs_dh0:
        last = torch.empty_like(g.dh)
        gemm.product(last, start, w.hidden)
        g.dh.add_(last if d.noise.drop is None else last * d.noise.drop)
    return total


def _write_small(total: VariantWeights, sums: Tensor, width: int, H: int) -> None:
    """Write what the kernels summed: gradients of both norms, biases, the norm of c, its shift, and peepholes."""
    input_norm, hidden_norm, bias, *others = sums.split([width, width, width, H, H, 3 * H])
    gradients = (input_norm, hidden_norm, bias, bias, *others)
    norms, biases = (total.input_norm, total.hidden_norm), (total.input_bias, total.hidden_bias)
    small = (*norms, *biases, total.cell_norm, total.cell_bias, total.peephole)
    for tensor, gradient in zip(small, gradients, strict=True):
        if tensor is not None:
            tensor.copy_(gradient[: tensor.numel()])


def _dropped(h_before: Tensor, d: Direction, chunk: Chunk) -> Tensor:
    if d.noise.drop is None:
        return h_before
    places = row_places([d.course.layout.step_rows(t) for t in range(chunk.begin, chunk.end)])
    return h_before * d.noise.drop[places]


def _stashed(d: Direction, chunk: Chunk) -> _Restored:
    return _Restored(d.kept.of_chunk(chunk), d.course.state_before(d.kept.cells, d.c0, chunk))


def _room_for_gradients(d: Direction, chunk: Chunk, kept: Kept) -> tuple[Tensor, Tensor]:
    """Return where gradients of the products of x and of h go: in place of what was rebuilt, else to new tensors."""
    if d.stash == "lean":
        return (kept.inputs, kept.products) if d.is_normalised else (kept.gates, kept.gates)
    dgates = d.x.new_empty(chunk.num_rows, d.width)
    return dgates, torch.empty_like(dgates) if d.is_normalised else dgates


@dataclass(frozen=True)
class _Rebuild:
    """What rebuilds a chunk from c before it and from x and h: two products for all its steps."""

    input: gemm.Packed
    hidden: gemm.Packed

    @staticmethod
    def of(d: Direction) -> "_Rebuild":
        """Pack the weights of a direction."""
        return _Rebuild(gemm.pack(d.weights.input), gemm.pack(d.weights.hidden))

    def run(self, d: Direction, chunk: Chunk, x: Tensor, h_before: Tensor) -> _Restored:
        """Return what the forward had, from what its steps read."""
        normalised, before = d.is_normalised, d.kept.cells[chunk.index]
        inputs, products = (d.x.new_empty(chunk.num_rows, d.width) for _ in range(2))
        gemm.product(inputs, x, self.input, bias=None if normalised else d.bias)
        # the sums of the forward's steps, so that both modes have the same bits
        gemm.product(products, h_before, self.hidden, by_kernels_only=True)
        nothing = d.x.new_empty(0)
        statistics = d.x.new_empty(chunk.num_rows, 4) if normalised else nothing
        of_row = d.x.new_empty(torch.get_num_threads(), d.width) if normalised else nothing
        cells, c = d.x.new_empty(chunk.num_rows, d.units), before.clone()
        arguments = _Forward(
            steps=d.steps(chunk),
            cell=d.cell(chunk),
            inputs=pointer(inputs),
            product=pointer(products),
            whole=1,
            statistics=pointer(statistics),
            scratch=pointer(of_row),
            c=pointer(c),
            cells=pointer(cells),
        )
        call("variant_rebuild", arguments)
        kept = Kept(nothing, inputs, products, statistics, cells)
        return _Restored(kept if normalised else Kept(inputs, nothing, nothing, nothing, cells), before)
