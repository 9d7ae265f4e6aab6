"""PyTorch's own recurrent functions on padded sequences, as calls of one operator for each layer.

They take the arguments of ``torch.lstm``, ``torch.gru``, ``torch.rnn_tanh`` and ``torch.rnn_relu``, in that order.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchecho.rnn.elman.op import elman
from torchecho.rnn.gru.op import gru as gru_layer
from torchecho.rnn.lstm.op import lstm as lstm_layer
from torchecho.rnn.stack import Layer, run_stack

_STASH = "auto"  # what a plan may choose


def lstm(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *others: object) -> tuple[Tensor, ...]:
    """Run ``torch.lstm``: x, (h, c), weights, has_biases, num_layers, dropout, train, bidirectional, batch_first."""

    def layer(x: Tensor, sizes: Tensor | None, first: tuple[Tensor, ...], own: list[Tensor]) -> tuple[Tensor, ...]:
        h0, c0 = first
        return lstm_layer(x, sizes, h0, c0, own, _STASH)

    return _run(layer, x, states, weights, *others)


def gru(x: Tensor, state: Tensor, weights: Sequence[Tensor], *others: object) -> tuple[Tensor, ...]:
    """Run ``torch.gru``: input, h, weights, and what `lstm` takes besides."""

    def layer(x: Tensor, sizes: Tensor | None, first: tuple[Tensor, ...], own: list[Tensor]) -> tuple[Tensor, ...]:
        return gru_layer(x, sizes, first[0], own, _STASH)

    return _run(layer, x, (state,), weights, *others)


def rnn_tanh(x: Tensor, state: Tensor, weights: Sequence[Tensor], *others: object) -> tuple[Tensor, ...]:
    """Run ``torch.rnn_tanh``, which takes what `gru` takes."""
    return _run(_elman_layer("tanh"), x, (state,), weights, *others)


def rnn_relu(x: Tensor, state: Tensor, weights: Sequence[Tensor], *others: object) -> tuple[Tensor, ...]:
    """Run ``torch.rnn_relu``, which takes what `gru` takes."""
    return _run(_elman_layer("relu"), x, (state,), weights, *others)


#: The functions by the names that PyTorch gives them.
FUNCTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "lstm": lstm,
    "gru": gru,
    "rnn_tanh": rnn_tanh,
    "rnn_relu": rnn_relu,
}


def _elman_layer(nonlinearity: str) -> Layer:
    def layer(x: Tensor, sizes: Tensor | None, first: tuple[Tensor, ...], own: list[Tensor]) -> tuple[Tensor, ...]:
        return elman(x, sizes, first[0], own, nonlinearity)

    return layer


def _run(
    layer: Layer, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *others: Any
) -> tuple[Tensor, ...]:
    _, num_layers, dropout, train, _, batch_first = others
    size = len(weights) // num_layers
    layers = [list(weights[place * size : (place + 1) * size]) for place in range(num_layers)]
    x = x.transpose(0, 1) if batch_first else x
    y, last = run_stack(layer, x, None, states, layers, dropout if train else 0.0)
    return y.transpose(0, 1) if batch_first else y, *last
