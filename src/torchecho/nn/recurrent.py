"""A cell that the user wrote as plain PyTorch, run over whole sequences."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from torchecho.errors import OptionError
from torchecho.nn.arguments import check_probability
from torchecho.rnn.loop import check_rows, run_cell

MODES = ("all", "lean")


class Recurrent(nn.Module):
    """Run cells over padded or packed sequences: layers, directions, dropout between layers, and a small stash.

    A cell is a module with ``forward(x_t, state) -> (output, state)``: `x_t` is [B, I], the output [B, P], the state a
    tensor with B rows or any nesting of tuples, lists and dicts of such tensors. B shrinks where packed sequences
    end, so a cell works on rows apart from each other. ``initial_state(x_t) -> state``, if the cell has it, makes the
    state that a call without `hx` starts from.

    Args:
        cells: One cell; or one for each layer; if bidirectional, one for each layer and direction: first layer forward,
            first layer backward, second layer forward, and so on. Each takes what the layer below puts out.
        batch_first: Padded input and output are [B, T, features].
        dropout: Probability of dropping an element of what one layer hands to the next.
        bidirectional: Whether every layer has two directions, with their outputs side by side.
        stash: ``"all"`` keeps for the backward whatever the cells' ops save; ``"lean"`` keeps the states every
            `chunk_steps` steps and runs the cell again, chunk by chunk, with the random numbers it drew. Gradients,
            of any order, have the same bits. A cell with side effects (running statistics) has them twice. Each chunk
            also keeps the state of the random numbers, 5 KB on the CPU, which no plan foresees.
        chunk_steps: Steps of a chunk of ``"lean"``; the square root of T by default.
    """

    def __init__(
        self,
        cells: nn.Module | Sequence[nn.Module],
        *,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        stash: str = "lean",
        chunk_steps: int | None = None,
    ) -> None:
        super().__init__()
        if stash not in MODES:
            raise OptionError(f"stash={stash!r} is no stash mode of Recurrent; use one of {', '.join(MODES)}")
        if chunk_steps is not None and chunk_steps < 1:
            raise OptionError(f"chunk_steps must be at least 1, got {chunk_steps}")
        listed = list(cells) if isinstance(cells, (Sequence, nn.ModuleList)) else [cells]
        directions = 2 if bidirectional else 1
        if not listed or len(listed) % directions:
            raise OptionError(f"give one cell for each layer and direction ({directions} a layer), got {len(listed)}")
        self.cells = nn.ModuleList(listed)
        self.batch_first, self.bidirectional = batch_first, bidirectional
        self.dropout = float(check_probability("dropout", dropout))
        self.stash, self.chunk_steps = stash, chunk_steps

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:  # noqa: A002 - torch.nn's name
        """Run all layers.

        Args:
            input: Padded [T, B, I], or [B, T, I] if batch_first; unbatched [T, I]; or a PackedSequence.
            hx: First state; with several cells, a list of one for each. The cells' `initial_state` if None. For
                unbatched input, tensors without the dimension of sequences.

        Returns:
            The output in the form of the input, and the last states in the form of `hx`.

        Raises:
            OptionError: no first state is given or made; or a cell or a state is not as it must be.
        """
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx)
        if input.dim() == 2:
            return self._forward_unbatched(input, hx)
        if input.dim() != 3:
            raise ValueError(f"Recurrent expects 2-D or 3-D input, got {input.dim()}-D")
        x = input.transpose(0, 1) if self.batch_first else input
        if x.shape[0] == 0:
            raise RuntimeError("the sequence length of the input must be larger than 0, got 0")
        y, last = self._run(x, None, self._first(hx, x[0]))
        return y.transpose(0, 1) if self.batch_first else y, self._as_hx(last)

    def _forward_unbatched(self, x: Tensor, hx: Any) -> tuple[Tensor, Any]:
        place = 0 if self.batch_first else 1
        y, last = self.forward(x.unsqueeze(place), pytree.tree_map_only(Tensor, lambda part: part.unsqueeze(0), hx))
        return y.squeeze(place), pytree.tree_map_only(Tensor, lambda part: part.squeeze(0), last)

    def _forward_packed(self, packed: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        data, batch_sizes, sorted_indices, unsorted_indices = packed
        first = self._first(hx, data[: int(batch_sizes[0])])
        if hx is not None and sorted_indices is not None:
            first = [_reordered(state, sorted_indices) for state in first]
        y, last = self._run(data, batch_sizes, first)
        if unsorted_indices is not None:
            last = [_reordered(state, unsorted_indices) for state in last]
        return PackedSequence(y, batch_sizes, sorted_indices, unsorted_indices), self._as_hx(last)

    def _run(self, x: Tensor, batch_sizes: Tensor | None, first: list[Any]) -> tuple[Tensor, list[Any]]:
        directions, last = 2 if self.bidirectional else 1, []
        num_steps = x.shape[0] if batch_sizes is None else batch_sizes.shape[0]
        chunk_steps = None if self.stash == "all" else self.chunk_steps or max(1, round(math.sqrt(num_steps)))
        for begin in range(0, len(self.cells), directions):
            if begin and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            outputs = []
            for d in range(directions):
                cell, state = self.cells[begin + d], self._state(first, begin + d, x, batch_sizes)
                y, after = run_cell(cell, x, batch_sizes, state, reverse=d == 1, chunk_steps=chunk_steps)
                outputs.append(y)
                last.append(after)
            x = torch.cat(outputs, -1) if directions == 2 else outputs[0]
        return x, last

    def _first(self, hx: Any, x: Tensor) -> list[Any]:
        """Return the given first states, one a cell; None for those that the cells make."""
        if hx is None:
            return [None] * len(self.cells)
        states = [hx] if len(self.cells) == 1 else list(hx)
        if len(states) != len(self.cells):
            raise OptionError(f"hx must have one state for each of {len(self.cells)} cells, got {len(states)}")
        for state in states:
            check_rows(state, x.shape[0])
        return states

    def _state(self, first: list[Any], place: int, x: Tensor, batch_sizes: Tensor | None) -> Any:
        if first[place] is not None:
            return first[place]
        make = getattr(self.cells[place], "initial_state", None)
        if make is None:
            raise OptionError(
                f"{type(self.cells[place]).__name__} has no initial_state(x_t), so every call needs a first state hx"
            )
        return make(x[0] if batch_sizes is None else x[: int(batch_sizes[0])])

    def _as_hx(self, states: list[Any]) -> Any:
        return states[0] if len(self.cells) == 1 else states

    def extra_repr(self) -> str:
        """Return whatever is not at its default."""
        defaults = {"batch_first": False, "dropout": 0.0, "bidirectional": False, "stash": "lean", "chunk_steps": None}
        return ", ".join(f"{n}={getattr(self, n)}" for n, value in defaults.items() if getattr(self, n) != value)


def _reordered(state: Any, indices: Tensor) -> Any:
    return pytree.tree_map(lambda part: part.index_select(0, indices), state)
