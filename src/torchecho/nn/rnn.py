"""Elman RNN with the arguments, results and state_dict of torch.nn.RNN."""

from typing import Any

from torch import Tensor

from torchecho.nn.module import RecurrentModule
from torchecho.rnn.elman.op import elman
from torchecho.rnn.elman.stash import MODES

_NONLINEARITY_PLACE = 3  # among the arguments given by position


class RNN(RecurrentModule):
    """Elman RNN with tanh or relu: torch.nn.RNN's arguments, and `stash`.

    Args:
        stash: ``"lean"``, which keeps nothing besides inputs and outputs and is the fastest; ``"auto"`` is the same.

    See torch.nn.RNN for the other arguments. Not a subclass of it, so that torch.compile does not stop at it.
    """

    _num_gates = 1
    _modes = MODES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if "proj_size" in kwargs:
            raise ValueError("only LSTM takes proj_size")
        if len(args) > _NONLINEARITY_PLACE:
            nonlinearity = args[_NONLINEARITY_PLACE]
            args = args[:_NONLINEARITY_PLACE] + args[_NONLINEARITY_PLACE + 1 :]
        else:
            nonlinearity = kwargs.pop("nonlinearity", "tanh")
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"nonlinearity must be 'tanh' or 'relu', got {nonlinearity!r}")
        super().__init__(*args, **kwargs)
        self.nonlinearity = nonlinearity

    def _layer(
        self, x: Tensor, batch_sizes: Tensor | None, states: tuple[Tensor, ...], weights: list[Tensor]
    ) -> tuple[Tensor, ...]:
        (h0,) = states
        return elman(x, batch_sizes, h0, weights, self.nonlinearity)
