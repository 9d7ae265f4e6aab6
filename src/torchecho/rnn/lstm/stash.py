"""What an LSTM layer keeps for its backward besides its input and output: four modes, all with the same gradients."""

from typing import Literal, get_args

Stash = Literal["gates", "preact", "cell", "lean"]

#: From the fastest backward to the smallest stash.
MODES: tuple[Stash, ...] = get_args(Stash)


def stash_bytes(stash: Stash, *, T: int, B: int, H: int, chunk_steps: int, itemsize: int = 4) -> int:
    """Return the bytes that one direction of one layer stashes, without its input and output.

    `gates` keeps the activations of the four gates and c; `preact` the gates before activation and c before each
    chunk; `cell` c alone; `lean` c before each chunk. A packed sequence of N rows counts as T = N / B.
    """
    every, chunks = T * B * H, -(-T // chunk_steps) * B * H
    elements = {"gates": 5 * every, "preact": 4 * every + chunks, "cell": every, "lean": chunks}
    return elements[stash] * itemsize
