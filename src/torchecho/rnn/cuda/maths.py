"""Functions of one number that Triton kernels share; all in float32."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Return tanh x: by exp(-2 |x|), and by its series near 0, where the difference would cancel."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    power = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - power) / (1.0 + power)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -far, far))
