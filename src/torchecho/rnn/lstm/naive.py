"""One LSTM layer in plain PyTorch: what the kernels must agree with. Differentiable any number of times."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchecho.rnn.recurrence import State, Step, run
from torchecho.rnn.weights import Weights


def layer(
    x: Tensor, batch_sizes: Tensor | None, h0: Tensor, c0: Tensor, weights: Sequence[Weights]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of all directions side by side, and the last h [D, B, P] and c [D, B, H]."""
    ran = [
        run(_step(w), F.linear(x, w.input, w.input_bias), batch_sizes, (h0[d], c0[d]), reverse=d == 1)
        for d, w in enumerate(weights)
    ]
    y = torch.cat([outputs for outputs, _ in ran], -1)
    return y, torch.stack([state[0] for _, state in ran]), torch.stack([state[1] for _, state in ran])


def _step(w: Weights) -> Step:
    def step(inputs: Tensor, state: State) -> State:
        h, c = state
        i, f, g, o = (inputs + F.linear(h, w.hidden, w.hidden_bias)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h if w.projection is None else F.linear(h, w.projection)), c

    return step
