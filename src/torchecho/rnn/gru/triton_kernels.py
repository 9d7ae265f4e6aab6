"""The Triton kernels of a GRU: one step forward, and one backward.

Rows of a step lie one after the other, so element `at` of a step's [rows, H] is row ``at // H``. The order of gates is
r, z, n in the two halves before activation; in the stash r, z, n and the hidden half of n; in gradients n, r, z and the
hidden half of n. All arithmetic is in float32.
"""

import triton
import triton.language as tl

from torchecho.rnn.cuda.maths import sigmoid, tanh


@triton.jit
def forward_step(
    inputs,
    recurrent,
    bias_n,
    h,
    y,
    gates,
    num,
    H,
    y_stride,
    BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take one step: write h and y, and with KEEP the activated gates [rows, 4H].

    `inputs` and `recurrent` [rows, 3H] are the two halves of the gates before activation; `bias_n` [H] is the hidden
    bias of n, with BIAS.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    row = at // H
    unit = at - row * H
    base = row * 3 * H + unit
    base_z = base + H
    base_n = base + 2 * H
    r = tl.load(inputs + base, inside, 0.0).to(tl.float32) + tl.load(recurrent + base, inside, 0.0).to(tl.float32)
    z = tl.load(inputs + base_z, inside, 0.0).to(tl.float32) + tl.load(recurrent + base_z, inside, 0.0).to(tl.float32)
    hn = tl.load(recurrent + base_n, inside, 0.0).to(tl.float32)
    if BIAS:
        hn += tl.load(bias_n + unit, inside, 0.0).to(tl.float32)
    r = sigmoid(r)
    z = sigmoid(z)
    n = tanh(tl.load(inputs + base_n, inside, 0.0).to(tl.float32) + r * hn)
    before = tl.load(h + at, inside, 0.0).to(tl.float32)
    out = (n + z * (before - n)).to(h.dtype.element_ty)
    tl.store(h + at, out, inside)
    tl.store(y + row * y_stride + unit, out, inside)
    if KEEP:
        kept = row * 4 * H + unit
        tl.store(gates + kept, r.to(gates.dtype.element_ty), inside)
        tl.store(gates + kept + H, z.to(gates.dtype.element_ty), inside)
        tl.store(gates + kept + 2 * H, n.to(gates.dtype.element_ty), inside)
        tl.store(gates + kept + 3 * H, hn.to(gates.dtype.element_ty), inside)


@triton.jit
def backward_step(
    gates,
    inputs,
    recurrent,
    bias_n,
    before,
    dy,
    dh,
    dgates,
    num,
    H,
    dy_stride,
    BIAS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take one step back: write the gradients of the gates [rows, 4H], and the direct part of that of the h before.

    With KEPT the activated gates come from the stash `gates`, else from `inputs`, `recurrent` and `bias_n` as forward.
    `before` [rows, H] is h before the step; `dh` is the gradient of h after it, and becomes that of `before`.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    row = at // H
    unit = at - row * H
    kept = row * 4 * H + unit
    if KEPT:
        r = tl.load(gates + kept, inside, 0.0).to(tl.float32)
        z = tl.load(gates + kept + H, inside, 0.0).to(tl.float32)
        n = tl.load(gates + kept + 2 * H, inside, 0.0).to(tl.float32)
        hn = tl.load(gates + kept + 3 * H, inside, 0.0).to(tl.float32)
    else:
        base = row * 3 * H + unit
        r = tl.load(inputs + base, inside, 0.0).to(tl.float32) + tl.load(recurrent + base, inside, 0.0).to(tl.float32)
        base_z = base + H
        z = tl.load(inputs + base_z, inside, 0.0).to(tl.float32)
        z += tl.load(recurrent + base_z, inside, 0.0).to(tl.float32)
        base_n = base + 2 * H
        hn = tl.load(recurrent + base_n, inside, 0.0).to(tl.float32)
        if BIAS:
            hn += tl.load(bias_n + unit, inside, 0.0).to(tl.float32)
        r = sigmoid(r)
        z = sigmoid(z)
        n = tanh(tl.load(inputs + base_n, inside, 0.0).to(tl.float32) + r * hn)
    d_h = tl.load(dh + at, inside, 0.0).to(tl.float32)
    d_h += tl.load(dy + row * dy_stride + unit, inside, 0.0).to(tl.float32)
    d_z = d_h * (tl.load(before + at, inside, 0.0).to(tl.float32) - n) * z * (1.0 - z)
    d_n = d_h * (1.0 - z) * (1.0 - n * n)
    out = dgates.dtype.element_ty
    tl.store(dh + at, (d_h * z).to(dh.dtype.element_ty), inside)
    tl.store(dgates + kept, d_n.to(out), inside)
    tl.store(dgates + kept + H, (d_n * hn * r * (1.0 - r)).to(out), inside)
    tl.store(dgates + kept + 2 * H, d_z.to(out), inside)
    tl.store(dgates + kept + 3 * H, (d_n * r).to(out), inside)
