"""The Triton kernels of an LSTM: one step forward, one backward, and the cells of a chunk rebuilt.

Rows of a step lie one after the other, so element `at` of a step's [rows, H] is row ``at // H``. The order of gates is
i, f, g, o. All arithmetic is in float32.
"""

import triton
import triton.language as tl

from torchecho.rnn.cuda.maths import sigmoid, tanh


@triton.jit
def forward_step(
    inputs,
    recurrent,
    cell,
    h,
    y,
    gates,
    cells,
    num,
    H,
    y_stride,
    KEEP: tl.constexpr,
    CELLS: tl.constexpr,
    PROJECTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take one step: write h and cell, y unless it is projected, and what the stash keeps of gates and cells.

    `inputs` and `recurrent` [rows, 4H] are the two halves of the gates before activation. KEEP is 1 for activated
    gates, 2 for those before activation, 0 for none; `gates` may be `inputs`.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    row = at // H
    unit = at - row * H
    base = row * 4 * H + unit
    i = tl.load(inputs + base, inside, 0.0).to(tl.float32) + tl.load(recurrent + base, inside, 0.0).to(tl.float32)
    base_f = base + H
    f = tl.load(inputs + base_f, inside, 0.0).to(tl.float32) + tl.load(recurrent + base_f, inside, 0.0).to(tl.float32)
    base_g = base + 2 * H
    g = tl.load(inputs + base_g, inside, 0.0).to(tl.float32) + tl.load(recurrent + base_g, inside, 0.0).to(tl.float32)
    base_o = base + 3 * H
    o = tl.load(inputs + base_o, inside, 0.0).to(tl.float32) + tl.load(recurrent + base_o, inside, 0.0).to(tl.float32)
    if KEEP == 2:
        tl.store(gates + base, i.to(gates.dtype.element_ty), inside)
        tl.store(gates + base_f, f.to(gates.dtype.element_ty), inside)
        tl.store(gates + base_g, g.to(gates.dtype.element_ty), inside)
        tl.store(gates + base_o, o.to(gates.dtype.element_ty), inside)
    i = sigmoid(i)
    f = sigmoid(f)
    g = tanh(g)
    o = sigmoid(o)
    c = f * tl.load(cell + at, inside, 0.0) + i * g
    out = (o * tanh(c)).to(h.dtype.element_ty)
    tl.store(cell + at, c, inside)
    tl.store(h + at, out, inside)
    if not PROJECTED:
        tl.store(y + row * y_stride + unit, out, inside)
    if CELLS:
        tl.store(cells + at, c, inside)
    if KEEP == 1:
        tl.store(gates + base, i.to(gates.dtype.element_ty), inside)
        tl.store(gates + base_f, f.to(gates.dtype.element_ty), inside)
        tl.store(gates + base_g, g.to(gates.dtype.element_ty), inside)
        tl.store(gates + base_o, o.to(gates.dtype.element_ty), inside)


@triton.jit
def rebuild(
    gates,
    recurrent,
    before,
    cells,
    spans,
    steps,
    num,
    H,
    SUM: tl.constexpr,
    CELLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Activate the gates of a chunk where they are, and write its cells: a scan over the steps, element by element.

    `spans` [3, steps] holds the first row and the rows of each step in the order of processing; `num` is B * H. With
    SUM, `recurrent` is the other half of the gates before activation.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = at // H
    unit = at - row * H
    c = tl.load(before + at, at < num, 0.0)
    step = 0
    # Not `for step in range(steps)`, which Triton 3.6's interpreter cannot do with NumPy 2.4.
    while step < steps:
        first = tl.load(spans + step)
        inside = at < tl.load(spans + steps + step) * H
        base = (first + row) * 4 * H + unit
        base_f = base + H
        base_g = base + 2 * H
        base_o = base + 3 * H
        i = tl.load(gates + base, inside, 0.0).to(tl.float32)
        f = tl.load(gates + base_f, inside, 0.0).to(tl.float32)
        g = tl.load(gates + base_g, inside, 0.0).to(tl.float32)
        o = tl.load(gates + base_o, inside, 0.0).to(tl.float32)
        if SUM:
            i += tl.load(recurrent + base, inside, 0.0).to(tl.float32)
            f += tl.load(recurrent + base_f, inside, 0.0).to(tl.float32)
            g += tl.load(recurrent + base_g, inside, 0.0).to(tl.float32)
            o += tl.load(recurrent + base_o, inside, 0.0).to(tl.float32)
        i = sigmoid(i)
        f = sigmoid(f)
        g = tanh(g)
        o = sigmoid(o)
        tl.store(gates + base, i.to(gates.dtype.element_ty), inside)
        tl.store(gates + base_f, f.to(gates.dtype.element_ty), inside)
        tl.store(gates + base_g, g.to(gates.dtype.element_ty), inside)
        tl.store(gates + base_o, o.to(gates.dtype.element_ty), inside)
        if CELLS:
            c = tl.where(inside, f * c + i * g, c)
            tl.store(cells + first * H + at, c, inside)
        step += 1


@triton.jit
def backward_step(
    gates,
    cells,
    before,
    c0,
    dy,
    dh,
    dc,
    dgates,
    unprojected,
    num,
    continuing,
    H,
    dy_stride,
    PROJECTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take one step back: write the gradients of the gates before activation, and that of the cell before.

    The cell before is that of `before` for the first `continuing` elements, and `c0` where a sequence starts. With
    PROJECTED, `dh` is already the whole gradient of h, and h is written to `unprojected`. `dgates` may be `gates`.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    row = at // H
    unit = at - row * H
    base = row * 4 * H + unit
    i = tl.load(gates + base, inside, 0.0).to(tl.float32)
    f = tl.load(gates + base + H, inside, 0.0).to(tl.float32)
    g = tl.load(gates + base + 2 * H, inside, 0.0).to(tl.float32)
    o = tl.load(gates + base + 3 * H, inside, 0.0).to(tl.float32)
    continues = at < continuing
    c_before = tl.load(before + at, inside & continues, 0.0)
    c_before += tl.load(c0 + at, inside & (at >= continuing), 0.0)
    t = tanh(tl.load(cells + at, inside, 0.0))
    d_h = tl.load(dh + at, inside, 0.0).to(tl.float32)
    if PROJECTED:
        tl.store(unprojected + at, (o * t).to(unprojected.dtype.element_ty), inside)
    else:
        d_h += tl.load(dy + row * dy_stride + unit, inside, 0.0).to(tl.float32)
    d_c = tl.load(dc + at, inside, 0.0) + d_h * o * (1.0 - t * t)
    tl.store(dc + at, d_c * f, inside)
    out = dgates.dtype.element_ty
    tl.store(dgates + base, (d_c * g * i * (1.0 - i)).to(out), inside)
    tl.store(dgates + base + H, (d_c * c_before * f * (1.0 - f)).to(out), inside)
    tl.store(dgates + base + 2 * H, (d_c * i * (1.0 - g * g)).to(out), inside)
    tl.store(dgates + base + 3 * H, (d_h * t * o * (1.0 - o)).to(out), inside)
