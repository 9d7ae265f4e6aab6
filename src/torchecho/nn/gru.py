"""GRU with the arguments, results and state_dict of torch.nn.GRU."""

from typing import Any

from torch import Tensor

from torchecho.nn.module import RecurrentModule
from torchecho.rnn.gru.op import gru
from torchecho.rnn.gru.stash import MODES


class GRU(RecurrentModule):
    """Gated recurrent unit: torch.nn.GRU's arguments, and `stash`.

    Args:
        stash: What the forward keeps for the backward besides inputs and outputs: ``"gates"`` or ``"lean"``, nothing,
            both with the same gradients. ``"auto"`` leaves it to a plan; without one it is ``"lean"``.

    See torch.nn.GRU for the other arguments. Not a subclass of it, so that torch.compile does not stop at it.
    """

    _num_gates = 3
    _modes = MODES
    _autocasts = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if "proj_size" in kwargs:
            raise ValueError("only LSTM takes proj_size")
        super().__init__(*args, **kwargs)

    def _layer(
        self, x: Tensor, batch_sizes: Tensor | None, states: tuple[Tensor, ...], weights: list[Tensor]
    ) -> tuple[Tensor, ...]:
        (h0,) = states
        return gru(x, batch_sizes, h0, weights, self.stash)
