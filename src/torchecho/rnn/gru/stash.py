"""What a GRU layer keeps for its backward besides its input and output: two modes with the same gradients."""

from typing import Literal, get_args

Stash = Literal["gates", "lean"]

#: From the fastest backward to the smallest stash. Keeping the gates before activation would save nothing over
#: `gates`, since the candidate needs both its halves, and there is no cell.
MODES: tuple[Stash, ...] = get_args(Stash)


def stash_bytes(stash: Stash, *, T: int, B: int, H: int, chunk_steps: int, itemsize: int = 4) -> int:  # noqa: ARG001 - as for an LSTM
    """Return the bytes that one direction of one layer stashes, without its input and output.

    `gates` keeps the activations of r, z and n and the hidden half of n; `lean` keeps nothing. A packed sequence of
    N rows counts as T = N / B.
    """
    return {"gates": 4 * T * B * H, "lean": 0}[stash] * itemsize
