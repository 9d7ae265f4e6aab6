"""One GRU layer in plain PyTorch: what the kernels must agree with. Differentiable any number of times."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchecho.rnn.recurrence import State, Step, run
from torchecho.rnn.weights import Weights


def layer(x: Tensor, batch_sizes: Tensor | None, h0: Tensor, weights: Sequence[Weights]) -> tuple[Tensor, Tensor]:
    """Return the outputs of all directions side by side, and the last h [D, B, H]."""
    ran = [
        run(_step(w), F.linear(x, w.input, w.input_bias), batch_sizes, (h0[d],), reverse=d == 1)
        for d, w in enumerate(weights)
    ]
    return torch.cat([outputs for outputs, _ in ran], -1), torch.stack([state[0] for _, state in ran])


def _step(w: Weights) -> Step:
    def step(inputs: Tensor, state: State) -> State:
        (h,) = state
        xr, xz, xn = inputs.chunk(3, -1)
        hr, hz, hn = F.linear(h, w.hidden, w.hidden_bias).chunk(3, -1)
        z = (xz + hz).sigmoid()
        n = (xn + (xr + hr).sigmoid() * hn).tanh()
        return (n + z * (h - n),)

    return step
