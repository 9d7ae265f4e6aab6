"""What torch.nn's recurrent modules accept, and the kinds of error that they raise for the rest."""

import warnings
from typing import Any

from torch import Tensor


def check_types(**values: object) -> None:
    """Raise TypeError for sizes that are not int and switches that are not bool."""
    for name, value in values.items():
        expected = int if name.endswith("_size") else bool
        if not isinstance(value, expected):
            raise TypeError(f"{name} must be of type {expected.__name__}, got {type(value).__name__}")


def check_sizes(**values: int) -> None:
    """Raise ValueError for sizes and counts that are not positive."""
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} must be greater than zero, got {value}")


def check_projection(proj_size: int, hidden_size: int) -> None:
    """Raise ValueError unless the projection is smaller than the hidden state."""
    if not 0 <= proj_size < hidden_size:
        raise ValueError(
            f"proj_size must be at least 0 (none) and smaller than hidden_size={hidden_size}, got {proj_size}"
        )


def check_probability(name: str, value: object) -> float:
    """Return the value; raise ValueError if it is no probability."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a probability between 0 and 1, got {value!r}")
    return value


def check_dropout(dropout: object, num_layers: int) -> None:
    """Raise ValueError for what is no probability; warn when no layer hands anything to another."""
    if check_probability("dropout", dropout) > 0 and num_layers == 1:
        warnings.warn(
            f"dropout={dropout} is applied between layers only, and there is one layer (num_layers=1)", stacklevel=4
        )


def check_input(x: Tensor, input_size: int, batch_sizes: Tensor | None) -> None:
    """Raise RuntimeError for input without steps or with another number of features."""
    if x.shape[-1] != input_size:
        raise RuntimeError(f"input.size(-1) must equal input_size={input_size}, got {x.shape[-1]}")
    if batch_sizes is None and x.shape[0] == 0:
        raise RuntimeError("the sequence length of the input must be larger than 0, got 0")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise RuntimeError for a first state or a weight of another shape."""
    if tuple(tensor.shape) != shape:
        raise RuntimeError(f"{name} must have the shape {list(shape)}, got {list(tensor.shape)}")


def pair_of_states(hx: Any) -> tuple[Tensor, Tensor]:
    """Return the first h and c; raise TypeError for what is no tuple, and RuntimeError for another number of states."""
    if not isinstance(hx, (tuple, list)):
        raise TypeError(f"hx must be a tuple (h, c), got {type(hx).__name__}")
    if len(hx) != 2:
        raise RuntimeError(f"hx must have two states, (h, c), got {len(hx)}")
    return hx[0], hx[1]


def check_state_dims(states: tuple[Tensor, ...], *, batched: bool) -> None:
    """Raise RuntimeError unless first states are batched exactly if the input is."""
    expected = 3 if batched else 2
    found = [state.dim() for state in states]
    if any(dim != expected for dim in found):
        kind = f"{'batched 3' if batched else 'unbatched 2'}-D"
        raise RuntimeError(f"for {kind} input, first states must be {expected}-D too, got {found}")
