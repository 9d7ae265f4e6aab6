"""A recurrence in plain PyTorch: the time loop that every family's reference shares. Differentiable, of any dtype."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State], State]


def run(step: Step, x: Tensor, batch_sizes: Tensor | None, state: State, *, reverse: bool) -> tuple[Tensor, State]:
    """Run `step` over padded [T, B, I] or packed [rows, I] input.

    Args:
        step: Takes the input of one step and the state before it, and returns the state after it; what it returns
            first is the output. Both have the rows of the sequences that are long enough.
        x: The input.
        batch_sizes: Rows of each step of packed input.
        state: State before the first step, each [B, features].
        reverse: Process the last step first.

    Returns:
        The outputs in the order of the input, [T, B, features] or [rows, features], and the last states.
    """
    inputs: Sequence[Tensor] = x.unbind(0) if batch_sizes is None else x.split(batch_sizes.tolist())
    outputs = []
    for inputs_of_step in reversed(inputs) if reverse else inputs:
        rows = inputs_of_step.shape[0]
        after = step(inputs_of_step, tuple(part[:rows] for part in state))
        outputs.append(after[0])
        state = tuple(
            torch.cat((new, old[rows:])) if rows < old.shape[0] else new for new, old in zip(after, state, strict=True)
        )
    if reverse:
        outputs.reverse()
    return torch.stack(outputs) if batch_sizes is None else torch.cat(outputs), state
