"""Recurrent modules keep the dropout between their layers when they are unrolled."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import torchecho

PLANNED = {"max_slowdown": 0.0, "lowering": "eager", "cost": "roofline", "strict": True}


class Reader(nn.Module):
    """Reads a sequence and returns all that a recurrent module returns."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return outputs and last states."""
        made, last = self.layers(x)
        return made, *(last if isinstance(last, tuple) else (last,))


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Do one step from a fixed seed; return what was made and the gradients."""
    torch.manual_seed(1)
    made = model(x)
    sum(tensor.sin().sum() for tensor in made).backward()
    return [*(t.detach() for t in made), *(p.grad for p in model.parameters())]


LAYERS = {
    "lstm": lambda: nn.LSTM(6, 5, num_layers=3, dropout=0.4),
    "lstm both ways": lambda: nn.LSTM(6, 5, num_layers=2, dropout=0.4, bidirectional=True),
    "lstm batch first": lambda: nn.LSTM(6, 5, num_layers=2, dropout=0.4, batch_first=True),
    "lstm with projection": lambda: nn.LSTM(6, 5, num_layers=2, dropout=0.4, proj_size=3),
    "lstm without bias": lambda: nn.LSTM(6, 5, num_layers=2, dropout=0.4, bias=False),
    "gru": lambda: nn.GRU(6, 5, num_layers=2, dropout=0.4, bidirectional=True),
    "rnn": lambda: nn.RNN(6, 5, num_layers=2, dropout=0.4),
    "relu rnn": lambda: nn.RNN(6, 5, num_layers=2, dropout=0.4, nonlinearity="relu"),
    "one layer": lambda: nn.LSTM(6, 5),
    "several layers without dropout": lambda: nn.GRU(6, 5, num_layers=2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_same_dropout_as_plain_pytorch(name: str) -> None:
    plain = Reader(LAYERS[name]())
    planned = torchecho.optimize(copy.deepcopy(plain), **PLANNED)
    x = torch.randn(4, 3, 6)
    # oneDNN's fused LSTM may draw its dropout in another order than the layers do one by one
    torch._C._set_mkldnn_enabled(False)
    try:
        expected = step(plain, x)
    finally:
        torch._C._set_mkldnn_enabled(True)
    for made, right in zip(step(planned, x), expected, strict=True):
        torch.testing.assert_close(made, right)


def test_dropout_between_layers_really_draws() -> None:
    model = torchecho.optimize(Reader(nn.LSTM(6, 5, num_layers=2, dropout=0.5)), **PLANNED)
    x = torch.randn(4, 3, 6)
    first, second = model(x)[0], model(x)[0]
    assert not torch.equal(first, second)


def test_evaluation_draws_nothing() -> None:
    plain = Reader(nn.LSTM(6, 5, num_layers=2, dropout=0.5)).eval()
    model = torchecho.optimize(copy.deepcopy(plain), **PLANNED)
    x = torch.randn(4, 3, 6)
    for made, right in zip(step(model, x), step(plain, x), strict=True):
        torch.testing.assert_close(made, right)


def test_a_dropout_of_everything_leaves_the_last_layer_without_input() -> None:
    model = torchecho.optimize(Reader(nn.RNN(2, 1, num_layers=2, dropout=1.0, bias=False)), **PLANNED)
    made = model(torch.full((3, 1, 2), math.pi))[0]
    assert torch.equal(made, torch.zeros(3, 1, 1))
