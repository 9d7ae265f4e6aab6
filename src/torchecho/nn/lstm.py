"""LSTM with the arguments, results and state_dict of torch.nn.LSTM."""

from typing import Any

from torch import Tensor

from torchecho.nn.arguments import pair_of_states
from torchecho.nn.module import RecurrentModule
from torchecho.rnn.lstm.op import lstm
from torchecho.rnn.lstm.stash import MODES


class LSTM(RecurrentModule):
    """Long short-term memory: torch.nn.LSTM's arguments, and `stash`.

    Args:
        stash: What the forward keeps for the backward besides inputs and outputs: ``"gates"``, ``"preact"``,
            ``"cell"`` or ``"lean"``, from the fastest to the smallest, all with the same gradients. ``"auto"`` leaves
            it to a plan; without one it is ``"lean"``.

    See torch.nn.LSTM for the other arguments. Not a subclass of it, so that torch.compile does not stop at it.
    """

    _num_gates = 4
    _modes = MODES

    def _layer(
        self, x: Tensor, batch_sizes: Tensor | None, states: tuple[Tensor, ...], weights: list[Tensor]
    ) -> tuple[Tensor, ...]:
        h0, c0 = states
        return lstm(x, batch_sizes, h0, c0, weights, self.stash)

    def _state_shapes(self, batch: int) -> list[tuple[int, int, int]]:
        layers = self.num_layers * self._num_directions
        return [(layers, batch, self._output_size), (layers, batch, self.hidden_size)]

    def _states(self, hx: Any) -> tuple[Tensor, ...] | None:
        return None if hx is None else pair_of_states(hx)

    def _as_hx(self, states: list[Tensor]) -> Any:
        return tuple(states)
