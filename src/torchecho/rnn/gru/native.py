"""One GRU layer by the C++ kernels, chunk by chunk: forward, and backward from either stash mode."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchecho.rnn import gemm
from torchecho.rnn.floats import floats_of, give_back, is_rounded, window_of
from torchecho.rnn.gradients import Gradients, WeightGradients
from torchecho.rnn.library import Struct, call, has_pairs, numbers, pointer
from torchecho.rnn.sequence import Chunk, Course, StepsStruct
from torchecho.rnn.weights import Weights


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
class Direction:
    """One direction of one layer, and everything that both its passes read."""

    course: Course
    x: Tensor  # [T, B, I] or [rows, I]
    h0: Tensor  # [B, H]
    weights: Weights
    y: Tensor  # [rows, H], a slice of the layer's output
    gates: Tensor | None  # [rows, 4H] if stashed

    @property
    def units(self) -> int:
        """Return H."""
        return self.h0.shape[1]

    def steps(self, chunk: Chunk) -> StepsStruct:
        """Return what the kernels are told about the steps of a chunk."""
        return self.course.struct(chunk, self.weights.hidden.numel())

    def with_floats(self) -> "Direction":
        """Return it with weights and the first state in float32, the state in one piece."""
        return replace(self, weights=self.weights.float(), h0=self.h0.float().contiguous())


def forward(d: Direction) -> tuple[Tensor]:
    """Write y and the stash; return the last h [B, H]."""
    d = d.with_floats()
    H, chunks = d.units, d.course.chunks
    pairs, bias = has_pairs(d.y.dtype), _bias(d.weights)
    recurrent = gemm.pack(d.weights.hidden, parts=3, pairs=pairs)
    input_weight = gemm.pack(d.weights.input, pairs=pairs)
    bias_n = None if d.weights.hidden_bias is None else d.weights.hidden_bias[2 * H :].contiguous()
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


def _bias(w: Weights) -> Tensor | None:
    """Return the biases that meet in one sum before r and z, and the input's alone for n."""
    if w.input_bias is None or w.hidden_bias is None:
        return None
    bias, rz = w.input_bias.clone(), slice(2 * w.hidden.shape[1])
    bias[rz] += w.hidden_bias[rz]
    return bias


def backward(d: Direction, g: Gradients) -> WeightGradients:
    """Return the gradients of the weights, and write those of x and h0 to `g`."""
    dtype, d = d.weights.input.dtype, d.with_floats()
    H, B, w, chunks = d.units, d.course.batch, d.weights, d.course.chunks
    total, dh = WeightGradients.of(w), g.dh.float()
    pairs = has_pairs(d.y.dtype)
    recurrent = gemm.pack_rows(w.hidden, 2 * H, pairs=pairs)  # n, r, z, as the gates lie
    recurrent_at, recurrent_stride = gemm.right_struct(recurrent)
    input_weight = None if g.dx is None else gemm.right(w.input, pairs=pairs)
    rebuild = _Rebuild.of(w, pairs=pairs) if d.gates is None else None
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
    def of(w: Weights, *, pairs: bool) -> "_Rebuild":
        """Pack the weights of a direction."""
        rz, n = slice(2 * w.hidden.shape[1]), slice(2 * w.hidden.shape[1], None)
        bias_n = None if w.hidden_bias is None else w.hidden_bias[n].contiguous()
        weights = w.input, w.hidden[rz], w.hidden[n]
        input_weight, hidden_rz, hidden_n = (gemm.pack(weight, pairs=pairs) for weight in weights)
        return _Rebuild(input_weight, hidden_rz, hidden_n, _bias(w), bias_n)

    def run(self, out: Tensor, x: Tensor, h_before: Tensor) -> None:
        """Write the gates to `out` [rows, 4H]."""
        H = out.shape[1] // 4
        gemm.product(out[:, H:], x, self.input, bias=self.bias)
        gemm.product(out[:, H : 3 * H], h_before, self.hidden_rz, accumulate=True, by_kernels_only=True)
        gemm.product(out[:, :H], h_before, self.hidden_n, bias=self.bias_n, by_kernels_only=True)
