"""What a layer of an LSTM variant keeps for its backward besides its input, output and noise."""

from typing import Literal, get_args

Stash = Literal["gates", "lean"]

#: From the fastest backward to the smallest stash.
MODES: tuple[Stash, ...] = get_args(Stash)


def stash_bytes(
    stash: Stash, *, T: int, B: int, H: int, chunk_steps: int, gates: int = 4, layer_norm: bool = False
) -> int:
    """Return the bytes that one direction of one layer of fp32 stashes, without its input, output and noise.

    `gates` keeps the activations of the gates and c; if they are normalised, both products and their statistics in
    place of the activations. `lean` keeps c before each chunk. A packed sequence of N rows counts as T = N / B.
    """
    if stash == "lean":
        return -(-T // chunk_steps) * B * H * 4
    return T * B * (H + (2 * gates * H + 4 if layer_norm else gates * H)) * 4
