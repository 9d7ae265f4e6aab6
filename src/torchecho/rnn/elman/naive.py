"""One Elman RNN layer in plain PyTorch: what the kernels must agree with. Differentiable any number of times."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchecho.rnn.recurrence import State, Step, run
from torchecho.rnn.weights import Weights


def layer(
    x: Tensor, batch_sizes: Tensor | None, h0: Tensor, weights: Sequence[Weights], nonlinearity: str
) -> tuple[Tensor, Tensor]:
    """Return the outputs of all directions side by side, and the last h [D, B, H]."""
    ran = [
        run(_step(w, nonlinearity), F.linear(x, w.input, w.input_bias), batch_sizes, (h0[d],), reverse=d == 1)
        for d, w in enumerate(weights)
    ]
    return torch.cat([outputs for outputs, _ in ran], -1), torch.stack([state[0] for _, state in ran])


def _step(w: Weights, nonlinearity: str) -> Step:
    activation = torch.relu if nonlinearity == "relu" else torch.tanh

    def step(inputs: Tensor, state: State) -> State:
        return (activation(inputs + F.linear(state[0], w.hidden, w.hidden_bias)),)

    return step
