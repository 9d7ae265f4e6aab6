"""What an LSTM layer keeps for its backward besides its input and output: four modes, all with the same gradients."""

from typing import Literal, get_args

Stash = Literal["gates", "preact", "cell", "lean"]

#: From the fastest backward to the smallest stash.
MODES: tuple[Stash, ...] = get_args(Stash)


#: c is carried and stashed in float32, whatever the type of the layer.
_CELL_BYTES = 4


def stash_bytes(stash: Stash, *, T: int, B: int, H: int, chunk_steps: int, itemsize: int = 4) -> int:
    """Return the bytes that one direction of one layer stashes, without its input and output.

    `gates` keeps the activations of the four gates and c; `preact` the gates before activation and c before each
    chunk; `cell` c alone; `lean` c before each chunk. A packed sequence of N rows counts as T = N / B. Not modelled: on
    the CPU `preact` keeps what `gates` keeps where the type is bfloat16.
    """
    gates = 4 * T * B * H * itemsize if stash in ("gates", "preact") else 0
    steps = T if stash in ("gates", "cell") else -(-T // chunk_steps)
    return gates + steps * B * H * _CELL_BYTES
