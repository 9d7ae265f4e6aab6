"""One GRU layer by the C++ kernels, chunk by chunk: forward, and backward from either stash mode."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchecho.rnn import gemm
from torchecho.rnn.direction import OneDirection
from torchecho.rnn.floats import floats_of, give_back, is_rounded, window_of
from torchecho.rnn.gradients import Gradients, WeightGradients
from torchecho.rnn.library import Struct, call, has_pairs, numbers, pointer
from torchecho.rnn.sequence import StepsStruct


class _Forward(Struct):
    _fields_ = [  # noqa: RUF012 - ctypes asks for a plain list
        ("steps", StepsStruct),
        *numbers("hidden inputs recurrent bias_n gates h0 y y_stride is_bfloat16"),
    ]


class _Backward(Struct):
    _fields_ = [  # noqa: RUF012 - as above
        ("steps", StepsStruct),
        *numbers("hidden gates dgates dgates_stride recurrent recurrent_stride h0 y y_stride dy dy_stride dh"),
        *numbers("dgates_after dgates_start is_bfloat16"),
    ]


@dataclass(frozen=True)
class Direction(OneDirection):
    """One direction of one layer, and everything that both its passes read."""

    gates: Tensor | None  # [rows, 4H] if stashed

    @property
    def bias(self) -> Tensor | None:
        """Return the biases that meet in one sum before r and z, and the input's alone for n."""
        first, second = self.weights.input_bias, self.weights.hidden_bias
        if first is None or second is None:
            return None
        bias, rz = first.clone(), slice(2 * self.units)
        bias[rz] += second[rz]
        return bias

    @property
    def bias_n(self) -> Tensor | None:
        """Return the hidden side's bias for n, which r multiplies too."""
        bias = self.weights.hidden_bias
        return None if bias is None else bias[2 * self.units :].contiguous()


def forward(d: Direction) -> tuple[Tensor]:
    """Write y and the stash; return the last h [B, H]."""
    d = d.with_floats()
    H, chunks = d.units, d.course.chunks
    pairs, bias, bias_n = has_pairs(d.y.dtype), d.bias, d.bias_n
    recurrent = gemm.pack(d.weights.hidden, parts=3, pairs=pairs)
    input_weight = gemm.pack(d.weights.input, pairs=pairs)
    most = d.course.most_rows
    scratch = d.h0.new_empty(most, 3 * H)
    wide = None if d.gates is None or d.gates.dtype == torch.float32 else d.h0.new_empty(most, 4 * H)
    arguments = _Forward(
        hidden=H,
        recurrent=pointer(recurrent.data),
        bias_n=pointer(bias_n),
        h0=pointer(d.h0),
        is_bfloat16=is_rounded(d.y),
    )
    for chunk in chunks:
        inputs, y = scratch[: chunk.num_rows], window_of(d.y, d.course, chunk)
        stored = None if d.gates is None else d.gates[chunk.rows]
        gates = stored if wide is None else wide[: chunk.num_rows]
        gemm.product(inputs, floats_of(d.x, chunk), input_weight, bias=bias)
        arguments.steps, arguments.inputs, arguments.gates = d.steps(chunk), pointer(inputs), pointer(gates)
        arguments.y, arguments.y_stride = y.at, y.stride
        call("gru_forward", arguments)
        y.give_back(chunk)
        if stored is not None and gates is not None:
            give_back(stored, gates)
        del y  # gone before the next chunk makes its own
    return (d.course.last_rows(d.y),)


def backward(d: Direction, g: Gradients) -> WeightGradients:
    """Return the gradients of the weights, and write those of x and h0 to `g`."""
    dtype, d = d.weights.input.dtype, d.with_floats()
    H, B, w, chunks = d.units, d.course.batch, d.weights, d.course.chunks
    total, dh = WeightGradients.of(w), g.dh.float()
    pairs = has_pairs(d.y.dtype)
    recurrent = gemm.pack_rows(w.hidden, 2 * H, pairs=pairs)  # n, r, z, as the gates lie
    recurrent_at, recurrent_stride = gemm.right_struct(recurrent)
    input_weight = None if g.dx is None else gemm.right(w.input, pairs=pairs)
    rebuild = _Rebuild.of(d, pairs=pairs) if d.gates is None else None
    space = gemm.spaced_rows(d.h0, d.course.most_rows, 4 * H)
    after, start = d.h0.new_empty(B, 4 * H), d.h0.new_empty(B, 4 * H)
    bias = None if w.input_bias is None else d.h0.new_empty(4 * H)
    arguments = _Backward(
        hidden=H,
        dgates=pointer(space),
        dgates_stride=space.stride(0),
        recurrent=recurrent_at,
        recurrent_stride=recurrent_stride,
        h0=pointer(d.h0),
        dh=pointer(dh),
        dgates_after=pointer(after),
        dgates_start=pointer(start),
        is_bfloat16=is_rounded(d.y),
    )
    for chunk in reversed(chunks):
        dgates, x, own_dy = space[: chunk.num_rows], floats_of(d.x, chunk), floats_of(g.dy, chunk)
        gates = None if d.gates is None else d.gates[chunk.rows].float()
        h_before = d.course.rows_before(d.y, d.h0, chunk).float()
        y = window_of(d.y, d.course, chunk)
        if rebuild is not None:
            rebuild.run(dgates, x, h_before)
        arguments.steps, arguments.gates = d.steps(chunk), pointer(gates)
        arguments.y, arguments.y_stride = y.at, y.stride
        arguments.dy, arguments.dy_stride = pointer(own_dy), own_dy.stride(0)
        call("gru_backward", arguments)
        if input_weight is not None:
            g.give_dx(chunk.rows, dgates[:, H:], input_weight)
        _add(total, bias, dgates, x, h_before, first=chunk is chunks[-1], pairs=pairs)
        del x, own_dy, gates, h_before, y  # gone before the next chunk makes its own
    _put_n_last(total.hidden)
    if bias is not None and total.input_bias is not None and total.hidden_bias is not None:
        total.input_bias.copy_(bias[H:])
        total.hidden_bias.copy_(bias[: 3 * H])
        _put_n_last(total.hidden_bias)
    if g.needs_dh0:
        gemm.product(dh, start[:, : 3 * H], recurrent, accumulate=True)
        give_back(g.dh, dh)
    return total.to(dtype)


def _put_n_last(gradient: Tensor) -> None:
    """Change rows n, r, z, the order in which gradients of the gates lie, to r, z, n in place."""
    n, r, z = gradient.split(gradient.shape[0] // 3)
    kept = n.clone()
    n.copy_(r)
    r.copy_(z)
    z.copy_(kept)


def _add(
    total: WeightGradients,
    bias: Tensor | None,
    dgates: Tensor,
    x: Tensor,
    h_before: Tensor,
    *,
    first: bool,
    pairs: bool,
) -> None:
    """Add the gradients of a chunk, or write them if it is the first: of h_n, r, z for h, of all four for biases."""
    H = total.hidden.shape[1]
    gemm.product(total.input, dgates[:, H:].t(), gemm.right(x, pairs=pairs), accumulate=not first)
    gemm.product(total.hidden, dgates[:, : 3 * H].t(), gemm.right(h_before, pairs=pairs), accumulate=not first)
    if bias is not None:
        gemm.sum_rows(bias, dgates, accumulate=not first)


@dataclass(frozen=True)
class _Rebuild:
    """What rebuilds a chunk's gates before activation, h_n, r, z and x_n: products for all its steps."""

    input: gemm.Packed
    hidden_rz: gemm.Packed
    hidden_n: gemm.Packed
    bias: Tensor | None
    bias_n: Tensor | None

    @staticmethod
    def of(d: Direction, *, pairs: bool) -> "_Rebuild":
        """Pack the weights of a direction."""
        w, rows_rz = d.weights, 2 * d.units
        weights = w.input, w.hidden[:rows_rz], w.hidden[rows_rz:]
        input_weight, hidden_rz, hidden_n = (gemm.pack(weight, pairs=pairs) for weight in weights)
        return _Rebuild(input_weight, hidden_rz, hidden_n, d.bias, d.bias_n)

    def run(self, out: Tensor, x: Tensor, h_before: Tensor) -> None:
        """Write the gates to `out` [rows, 4H]."""
        H = out.shape[1] // 4
        gemm.product(out[:, H:], x, self.input, bias=self.bias)
        gemm.product(out[:, H : 3 * H], h_before, self.hidden_rz, accumulate=True, by_kernels_only=True)
        gemm.product(out[:, :H], h_before, self.hidden_n, bias=self.bias_n, by_kernels_only=True)
