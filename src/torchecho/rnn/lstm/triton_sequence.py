"""The Triton kernels that take all steps of a chunk of an LSTM in one launch, for layers of few units.

A program owns some sequences and keeps the recurrent weights of all gates in shared memory, as operands of its
products, while it goes from step to step; nothing has to be agreed with other programs. Sizes are padded to powers of
2. Loops count by `range`: of `while` loops Triton 3.6 makes code that keeps the weights in registers, which spill.
"""

import triton
import triton.language as tl

from torchecho.rnn.cuda.maths import sigmoid, tanh


@triton.jit
def forward_sequence(
    gates,
    weight,
    h,
    cell,
    y,
    cells,
    spans,
    steps,
    B,
    y_stride,
    H: tl.constexpr,
    KEEP: tl.constexpr,
    CELLS: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Take the steps of a chunk: what `forward_step` writes, with `gates` [rows, 4H] the input's half of the gates.

    `spans` [3, steps] holds the first row of each step in the order of processing, its rows, and how many of them
    continue a sequence.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    units = tl.arange(0, UNITS)
    fits = units[None, :] < H
    # weight[n, k] as an operand [k, n]
    at = units[None, :] * H + units[:, None]
    square = fits & (units[:, None] < H)
    weight_i = tl.load(weight + at, square, 0.0)
    weight_f = tl.load(weight + H * H + at, square, 0.0)
    weight_g = tl.load(weight + 2 * H * H + at, square, 0.0)
    weight_o = tl.load(weight + 3 * H * H + at, square, 0.0)
    own = rows[:, None] * H + units[None, :]
    wide = rows[:, None] * 4 * H + units[None, :]
    outward = rows[:, None] * y_stride + units[None, :]
    exists = (rows[:, None] < B) & fits
    now = tl.load(h + own, exists, 0.0)
    c = tl.load(cell + own, exists, 0.0)
    for step in range(steps):
        first = tl.load(spans + step)
        inside = (rows[:, None] < tl.load(spans + steps + step)) & fits
        base = gates + first * 4 * H + wide
        i = tl.dot(now, weight_i, input_precision="ieee") + tl.load(base, inside, 0.0).to(tl.float32)
        f = tl.dot(now, weight_f, input_precision="ieee") + tl.load(base + H, inside, 0.0).to(tl.float32)
        g = tl.dot(now, weight_g, input_precision="ieee") + tl.load(base + 2 * H, inside, 0.0).to(tl.float32)
        o = tl.dot(now, weight_o, input_precision="ieee") + tl.load(base + 3 * H, inside, 0.0).to(tl.float32)
        if KEEP == 2:
            tl.store(base, i.to(gates.dtype.element_ty), inside)
            tl.store(base + H, f.to(gates.dtype.element_ty), inside)
            tl.store(base + 2 * H, g.to(gates.dtype.element_ty), inside)
            tl.store(base + 3 * H, o.to(gates.dtype.element_ty), inside)
        i = sigmoid(i)
        f = sigmoid(f)
        g = tanh(g)
        o = sigmoid(o)
        if KEEP == 1:
            tl.store(base, i.to(gates.dtype.element_ty), inside)
            tl.store(base + H, f.to(gates.dtype.element_ty), inside)
            tl.store(base + 2 * H, g.to(gates.dtype.element_ty), inside)
            tl.store(base + 3 * H, o.to(gates.dtype.element_ty), inside)
        c = tl.where(inside, f * c + i * g, c)
        now = tl.where(inside, (o * tanh(c)).to(h.dtype.element_ty), now)
        tl.store(y + first * y_stride + outward, now, inside)
        if CELLS:
            tl.store(cells + first * H + own, c, inside)
    tl.store(h + own, now, exists)
    tl.store(cell + own, c, exists)


@triton.jit
def backward_sequence(
    gates,
    cells,
    before,
    c0,
    weight,
    dy,
    dh,
    dc,
    dgates,
    spans,
    steps,
    B,
    dy_stride,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Take the steps of a chunk back: what `backward_step` writes; `dgates` may be `gates`.

    `before` are the cells before the first step; `c0` is the cell where a sequence starts.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    units = tl.arange(0, UNITS)
    fits = units[None, :] < H
    # weight[n, k] as it is, an operand [n, k]
    at = units[:, None] * H + units[None, :]
    square = fits & (units[:, None] < H)
    weight_i = tl.load(weight + at, square, 0.0)
    weight_f = tl.load(weight + H * H + at, square, 0.0)
    weight_g = tl.load(weight + 2 * H * H + at, square, 0.0)
    weight_o = tl.load(weight + 3 * H * H + at, square, 0.0)
    own = rows[:, None] * H + units[None, :]
    wide = rows[:, None] * 4 * H + units[None, :]
    outward = rows[:, None] * dy_stride + units[None, :]
    exists = (rows[:, None] < B) & fits
    d_h = tl.load(dh + own, exists, 0.0).to(tl.float32)
    d_c = tl.load(dc + own, exists, 0.0)
    out = dgates.dtype.element_ty
    for back in range(steps):
        step = steps - 1 - back
        first = tl.load(spans + step)
        inside = (rows[:, None] < tl.load(spans + steps + step)) & fits
        continues = rows[:, None] < tl.load(spans + 2 * steps + step)
        previous = tl.load(spans + step - 1, step > 0, 0)
        base = gates + first * 4 * H + wide
        i = tl.load(base, inside, 0.0).to(tl.float32)
        f = tl.load(base + H, inside, 0.0).to(tl.float32)
        g = tl.load(base + 2 * H, inside, 0.0).to(tl.float32)
        o = tl.load(base + 3 * H, inside, 0.0).to(tl.float32)
        c_before = tl.load(cells + previous * H + own, inside & continues & (step > 0), 0.0)
        c_before += tl.load(before + own, inside & continues & (step == 0), 0.0)
        c_before += tl.load(c0 + own, inside & (rows[:, None] >= tl.load(spans + 2 * steps + step)), 0.0)
        t = tanh(tl.load(cells + first * H + own, inside, 0.0))
        whole = d_h + tl.load(dy + first * dy_stride + outward, inside, 0.0).to(tl.float32)
        d_cell = d_c + whole * o * (1.0 - t * t)
        to = dgates + first * 4 * H + wide
        d_gate = (d_cell * g * i * (1.0 - i)).to(out)
        tl.store(to, d_gate, inside)
        d_before = tl.dot(d_gate, weight_i, input_precision="ieee")
        d_gate = (d_cell * c_before * f * (1.0 - f)).to(out)
        tl.store(to + H, d_gate, inside)
        d_before = tl.dot(d_gate, weight_f, d_before, input_precision="ieee")
        d_gate = (d_cell * i * (1.0 - g * g)).to(out)
        tl.store(to + 2 * H, d_gate, inside)
        d_before = tl.dot(d_gate, weight_g, d_before, input_precision="ieee")
        d_gate = (whole * t * o * (1.0 - o)).to(out)
        tl.store(to + 3 * H, d_gate, inside)
        d_before = tl.dot(d_gate, weight_o, d_before, input_precision="ieee")
        d_h = tl.where(inside, d_before, d_h)
        d_c = tl.where(inside, d_cell * f, d_c)
    tl.store(dh + own, d_h.to(dh.dtype.element_ty), exists)
    tl.store(dc + own, d_c, exists)
