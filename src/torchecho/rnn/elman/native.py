"""One Elman RNN layer by the C++ kernels, chunk by chunk."""

from dataclasses import dataclass

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
        *numbers("hidden relu inputs recurrent h0 y y_stride is_bfloat16"),
    ]


class _Backward(Struct):
    _fields_ = [  # noqa: RUF012 - as above
        ("steps", StepsStruct),
        *numbers("hidden relu recurrent recurrent_stride y y_stride dy dy_stride dh_last"),
        *numbers("dinputs_after dinputs dinputs_stride dinputs_start"),
    ]


@dataclass(frozen=True)
class Direction(OneDirection):
    """One direction of one layer, and everything that both its passes read."""

    relu: bool  # or tanh


def forward(d: Direction) -> tuple[Tensor]:
    """Write y; return the last h [B, H]."""
    d = d.with_floats()
    chunks, pairs, bias = d.course.chunks, has_pairs(d.y.dtype), d.bias
    input_weight, recurrent = gemm.pack(d.weights.input, pairs=pairs), gemm.pack(d.weights.hidden, pairs=pairs)
    scratch = d.h0.new_empty(d.course.most_rows, d.units)
    arguments = _Forward(
        hidden=d.units,
        relu=d.relu,
        recurrent=pointer(recurrent.data),
        h0=pointer(d.h0),
        is_bfloat16=is_rounded(d.y),
    )
    for chunk in chunks:
        inputs, y = scratch[: chunk.num_rows], window_of(d.y, d.course, chunk)
        gemm.product(inputs, floats_of(d.x, chunk), input_weight, bias=bias)
        arguments.steps, arguments.inputs = d.steps(chunk), pointer(inputs)
        arguments.y, arguments.y_stride = y.at, y.stride
        call("elman_forward", arguments)
        y.give_back(chunk)
        del y  # gone before the next chunk makes its own
    return (d.course.last_rows(d.y),)


def backward(d: Direction, g: Gradients) -> WeightGradients:
    """Return the gradients of the weights, and write those of x and h0 to `g`."""
    dtype, d = d.weights.input.dtype, d.with_floats()
    H, B, w, chunks = d.units, d.course.batch, d.weights, d.course.chunks
    total, dh = WeightGradients.of(w), g.dh.float()
    pairs = has_pairs(d.y.dtype)
    recurrent = gemm.for_steps(w.hidden, num_rows=d.y.shape[0], pairs=pairs)
    recurrent_at, recurrent_stride = gemm.right_struct(recurrent)
    input_weight = None if g.dx is None else gemm.right(w.input, pairs=pairs)
    all_dinputs = gemm.spaced_rows(d.h0, d.course.most_rows, H)
    after, start = d.h0.new_empty(B, H), d.h0.new_empty(B, H)
    arguments = _Backward(
        hidden=H,
        relu=d.relu,
        recurrent=recurrent_at,
        recurrent_stride=recurrent_stride,
        dh_last=pointer(dh),
        dinputs_after=pointer(after),
        dinputs=pointer(all_dinputs),
        dinputs_stride=all_dinputs.stride(0),
        dinputs_start=pointer(start),
    )
    for chunk in reversed(chunks):
        first = chunk is chunks[-1]
        dinputs, own_dy = all_dinputs[: chunk.num_rows], floats_of(g.dy, chunk)
        y = window_of(d.y, d.course, chunk)
        arguments.steps = d.steps(chunk)
        arguments.y, arguments.y_stride = y.at, y.stride
        arguments.dy, arguments.dy_stride = pointer(own_dy), own_dy.stride(0)
        call("elman_backward", arguments)
        if input_weight is not None:
            g.give_dx(chunk.rows, dinputs, input_weight)
        h_before = d.course.rows_before(d.y, d.h0, chunk).float()
        total.add(dinputs, floats_of(d.x, chunk), h_before, first=first, pairs=pairs)
        del own_dy, y, h_before  # gone before the next chunk makes its own
    if total.hidden_bias is not None and total.input_bias is not None:
        total.hidden_bias.copy_(total.input_bias)
    if g.needs_dh0:
        gemm.product(dh, start, w.hidden)
        give_back(g.dh, dh)
    return total.to(dtype)
