"""One GRU layer by the C++ kernels, chunk by chunk: forward, and backward from either stash mode."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchecho.rnn import gemm
from torchecho.rnn.gradients import WeightGradients, add_bias, add_weight
from torchecho.rnn.library import Struct, call, numbers, pointer
from torchecho.rnn.sequence import Chunk, Layout, StepsStruct, keep_first_step, last_rows, rows_before, rows_of
from torchecho.rnn.weights import Weights


class _Forward(Struct):
    _fields_ = [  # noqa: RUF012 - ctypes asks for a plain list
        ("steps", StepsStruct),
        *numbers("hidden inputs recurrent bias_n gates h0 y y_stride"),
    ]


class _Backward(Struct):
    _fields_ = [  # noqa: RUF012 - as above
        ("steps", StepsStruct),
        *numbers("hidden gates dinputs dhiddens recurrent h0 y y_stride dy dy_stride dh"),
        *numbers("dhiddens_after dhiddens_start"),
    ]


@dataclass(frozen=True)
class Direction:
    """One direction of one layer, and everything that both its passes read."""

    layout: Layout
    reverse: bool
    chunk_steps: int
    x: Tensor  # [T, B, I] or [rows, I]
    h0: Tensor  # [B, H]
    weights: Weights
    y: Tensor  # [rows, H], a slice of the layer's output
    gates: Tensor | None  # [rows, 4H] if stashed

    @property
    def units(self) -> int:
        """Return H."""
        return self.h0.shape[1]

    def chunks(self) -> list[Chunk]:
        """Return the chunks in the order of processing."""
        return self.layout.chunks(self.chunk_steps, reverse=self.reverse)


def forward(d: Direction) -> Tensor:
    """Write y and the stash; return the last h [B, H]."""
    H, h0, chunks = d.units, d.h0.contiguous(), d.chunks()
    input_panels, bias = gemm.pack_transposed(d.weights.input), _input_side_bias(d)
    recurrent = gemm.pack_transposed(d.weights.hidden, parts=3)
    bias_n = None if d.weights.hidden_bias is None else d.weights.hidden_bias[2 * H :].contiguous()
    scratch = d.x.new_empty(max(c.num_rows for c in chunks), 3 * H)
    for chunk in chunks:
        inputs = scratch[: chunk.num_rows]
        gemm.multiply(inputs, rows_of(d.x, chunk), input_panels, bias=bias)
        arguments = _Forward(
            steps=d.layout.struct(chunk, reverse=d.reverse),
            hidden=H,
            inputs=pointer(inputs),
            recurrent=pointer(recurrent.data),
            bias_n=pointer(bias_n),
            gates=0 if d.gates is None else pointer(d.gates[chunk.rows]),
            h0=pointer(h0),
            y=pointer(d.y),
            y_stride=d.y.stride(0),
        )
        call("gru_forward", arguments)
    return last_rows(d.y, d.layout, reverse=d.reverse)


def _input_side_bias(d: Direction) -> Tensor | None:
    """Return the biases that meet in one sum before r and z, and the input's alone for n."""
    if d.weights.input_bias is None or d.weights.hidden_bias is None:
        return None
    bias = d.weights.input_bias.clone()
    bias[: 2 * d.units] += d.weights.hidden_bias[: 2 * d.units]
    return bias


def backward(d: Direction, dy: Tensor, dh: Tensor, dx: Tensor | None, *, add_to_dx: bool) -> WeightGradients:
    """Return the gradients of the weights, and write those of x and h0.

    Args:
        d: The direction.
        dy: Gradient of its output, [T, B, H] or [rows, H].
        dh: Gradient of the last h [B, H]; becomes that of h0.
        dx: Receives the gradient of x, [rows, I].
        add_to_dx: Whether dx already holds the other direction's.
    """
    H, B, w, chunks = d.units, d.layout.batch, d.weights, d.chunks()
    h0, total = d.h0.contiguous(), WeightGradients.of(w)
    recurrent = gemm.pack_rows(w.hidden)
    input_panels = None if dx is None else gemm.pack_rows(w.input)
    rebuild = _Rebuilder(d) if d.gates is None else None
    most = max(c.num_rows for c in chunks)
    all_dinputs, all_dhiddens = d.x.new_empty(most, 3 * H), d.x.new_empty(most, 3 * H)
    after, start = d.x.new_empty(B, 3 * H), d.x.new_empty(B, 3 * H)
    for chunk in reversed(chunks):
        first, n = chunk is chunks[-1], chunk.num_rows
        dinputs, dhiddens, x = all_dinputs[:n], all_dhiddens[:n], rows_of(d.x, chunk)
        h_before = rows_before(d.y, h0, d.layout, chunk, reverse=d.reverse)
        if rebuild is not None:
            rebuild(dinputs, dhiddens, x, h_before)
        own_dy = rows_of(dy, chunk)
        arguments = _Backward(
            steps=d.layout.struct(chunk, reverse=d.reverse),
            hidden=H,
            gates=0 if d.gates is None else pointer(d.gates[chunk.rows]),
            dinputs=pointer(dinputs),
            dhiddens=pointer(dhiddens),
            recurrent=pointer(recurrent.data),
            h0=pointer(h0),
            y=pointer(d.y),
            y_stride=d.y.stride(0),
            dy=pointer(own_dy),
            dy_stride=own_dy.stride(0),
            dh=pointer(dh),
            dhiddens_after=pointer(after),
            dhiddens_start=pointer(start),
        )
        call("gru_backward", arguments)
        keep_first_step(d.layout, chunk, dhiddens, after, reverse=d.reverse)
        if input_panels is not None:
            assert dx is not None
            gemm.multiply(dx[chunk.rows], dinputs, input_panels, accumulate=add_to_dx)
        add_weight(total.input, dinputs, x, first=first)
        add_weight(total.hidden, dhiddens, h_before, first=first)
        add_bias(total.input_bias, dinputs, first=first)
        add_bias(total.hidden_bias, dhiddens, first=first)
    gemm.multiply(dh, start, recurrent, accumulate=True)
    return total


class _Rebuilder:
    """The operands that rebuild both halves of the gates of a chunk: one product each for all its steps."""

    def __init__(self, d: Direction) -> None:
        self._input = gemm.pack_transposed(d.weights.input)
        self._hidden = gemm.pack_transposed(d.weights.hidden)
        self._biases = (d.weights.input_bias, d.weights.hidden_bias)

    def __call__(self, inputs: Tensor, hiddens: Tensor, x: Tensor, h_before: Tensor) -> None:
        gemm.multiply(inputs, x, self._input, bias=self._biases[0])
        gemm.multiply(hiddens, h_before, self._hidden, bias=self._biases[1])
