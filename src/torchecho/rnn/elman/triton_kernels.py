"""The Triton kernels of an Elman RNN: one step forward, and one backward from the output alone.

Rows of a step lie one after the other, so element `at` of a step's [rows, H] is row ``at // H``. All arithmetic is in
float32.
"""

import triton
import triton.language as tl

from torchecho.rnn.cuda.maths import tanh


@triton.jit
def forward_step(inputs, recurrent, h, y, num, H, y_stride, RELU: tl.constexpr, BLOCK: tl.constexpr):
    """Take one step: write h and y from the two halves of the sum before activation, `inputs` and `recurrent`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    row = at // H
    total = tl.load(inputs + at, inside, 0.0).to(tl.float32) + tl.load(recurrent + at, inside, 0.0).to(tl.float32)
    if RELU:
        # Not a maximum, which would lose NaN.
        total = tl.where(total < 0, 0.0, total)
    else:
        total = tanh(total)
    out = total.to(h.dtype.element_ty)
    tl.store(h + at, out, inside)
    tl.store(y + row * y_stride + (at - row * H), out, inside)


@triton.jit
def backward_step(y, dy, dh, dinputs, num, H, y_stride, dy_stride, RELU: tl.constexpr, BLOCK: tl.constexpr):
    """Take one step back: write the gradient before activation, from the gradient of h, `dh`, and that of y."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    row = at // H
    unit = at - row * H
    out = tl.load(y + row * y_stride + unit, inside, 0.0).to(tl.float32)
    d_h = tl.load(dh + at, inside, 0.0).to(tl.float32)
    d_h += tl.load(dy + row * dy_stride + unit, inside, 0.0).to(tl.float32)
    if RELU:
        d_h = tl.where(out <= 0, 0.0, d_h)  # behind a NaN it stays what it is
    else:
        d_h = d_h * (1.0 - out * out)
    tl.store(dinputs + at, d_h.to(dinputs.dtype.element_ty), inside)
