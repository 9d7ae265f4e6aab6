"""How many bytes the operators allocate inside and free again, for plans that are made before anything runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchecho.rnn.gemm import are_packed_for_steps, row_stride
from torchecho.rnn.library import has_pairs

_FLOAT_BYTES = 4
_MOST_LANES = 16  # of the widest kernels; narrower ones pad less
_GATES = {"lstm": 4, "gru": 3, "elman": 1}


def is_known(target: object) -> bool:
    """Return whether the scratch of a target is known."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "torchecho"  # noqa: SLF001 - no public name


def workspace_bytes(target: object, arguments: Sequence[Any]) -> int:
    """Return the bytes of scratch of a call of `torchecho::lstm`, `gru`, `elman` or `lstm_variant`, or of its backward.

    That of one direction of one layer on the CPU: what is packed, one chunk, and in bfloat16 float32 copies. Not
    modelled: tensors of a few bytes, sums of each thread, other devices, and what the reference allocates, which runs
    other types.

    Args:
        target: What is called.
        arguments: Its arguments; anything with `shape` and `dtype` may stand for a tensor.
    """
    assert isinstance(target, torch._ops.OpOverload)  # noqa: SLF001 - no public name
    name = target._schema.name.split("::")[1]  # noqa: SLF001 - no public way
    given = dict(zip((a.name for a in target._schema.arguments), arguments, strict=False))  # noqa: SLF001 - as above
    family = name.removesuffix("_backward")
    if given["x"].dtype not in (torch.float32, torch.bfloat16):
        return 0
    if family == "lstm_variant":
        return 0 if given["x"].dtype == torch.bfloat16 else _FLOAT_BYTES * _variant(given, backward=name != family)
    sizes = _Sizes.of(family, given)
    return _FLOAT_BYTES * (_forward(sizes) if name == family else _backward(sizes))


@dataclass(frozen=True)
class _Sizes:
    """Numbers that the scratch of one direction follows from."""

    family: str
    stash: str
    is_bfloat16: bool
    I: int  # noqa: E741 - as everywhere, I is the number of inputs
    H: int
    P: int
    B: int
    G: int
    pairs: bool  # what is packed are pairs of bfloat16
    rows: int  # of a chunk
    total: int  # rows of all chunks
    weights: int  # elements of all weights of one direction

    @staticmethod
    def of(family: str, given: Mapping[str, Any]) -> "_Sizes":
        """Read them off the arguments of an operator."""
        x, weights = given["x"].shape, [tuple(weight.shape) for weight in given["weights"]]
        D, B, P = given["h0"].shape
        G = _GATES.get(family) or 4 - bool(given["coupled"])
        total = math.prod(x[:-1])
        T = x[0] if given["batch_sizes"] is None else given["batch_sizes"].shape[0]
        longest = -(-T // -(-T // given["chunk_steps"]))  # steps of a chunk
        stash, is_bfloat16 = given.get("stash", "lean"), given["x"].dtype == torch.bfloat16
        return _Sizes(
            family=family,
            stash="gates" if is_bfloat16 and stash == "preact" else stash,  # it keeps the same there
            is_bfloat16=is_bfloat16,
            I=x[-1],
            H=weights[0][0] // G,
            P=P,
            B=B,
            G=G,
            pairs=has_pairs(given["x"].dtype),
            rows=min(total, longest * B),
            total=total,
            weights=sum(math.prod(weight) for weight in weights) // D,
        )

    @property
    def matrices(self) -> int:
        """Return the elements of the input's and the recurrent weights, packed."""
        return _padded(self.G * self.H) * (self.deep(self.I) + self.deep(self.P))

    @property
    def steps_backward(self) -> int:
        """Return the elements of the weights that every step of a backward reads, where it reads a copy."""
        projection = _padded(self.H) * self.P if self.P != self.H else 0
        depth = self.G * self.H
        is_copied = self.family == "gru" or are_packed_for_steps(depth, self.total, pairs=self.pairs)
        return (_padded(self.P) * self.deep(depth) if is_copied else 0) + projection

    def deep(self, depth: int) -> int:
        """Return the rows of a packed operand of some depth."""
        return -(-depth // 2) if self.pairs else depth

    @property
    def width(self) -> int:
        """Return the elements of a row of gates, as the backward wants them."""
        return self.H * (1 if self.family == "elman" else 4)

    @property
    def chunk(self) -> int:
        """Return the elements of the gates of a chunk."""
        return self.rows * self.width


def _padded(columns: int) -> int:
    return -(-columns // _MOST_LANES) * _MOST_LANES


def _forward(s: _Sizes) -> int:
    panels = s.G * _padded(s.H) * s.deep(s.P) + _padded(s.G * s.H) * s.deep(s.I)
    in_place = s.family == "lstm" and s.stash in ("gates", "preact") and not s.is_bfloat16
    scratch = 0 if in_place else s.rows * s.G * s.H
    states = s.B * (s.P + s.H) if s.family == "lstm" else s.B * s.P
    projection = (_padded(s.P) + s.B) * s.H if s.P != s.H else 0
    if not s.is_bfloat16:
        return panels + scratch + states + projection
    wide = s.chunk if s.family == "gru" and s.stash == "gates" else 0
    return panels + scratch + states + projection + wide + s.weights + s.rows * (s.I + s.P)


def _backward(s: _Sizes) -> int:
    rebuilds = s.family != "elman" and s.stash not in ("gates", "preact")
    packed = s.matrices if rebuilds else 0
    cells = s.rows * s.H if s.family == "lstm" and s.stash not in ("gates", "cell") else 0
    dgates = s.rows * row_stride(s.width)
    borders = 2 * s.B * (s.width + s.P)
    projection = s.rows * (s.P + s.H) if s.P != s.H else 0
    # h before each step, or a third of a gradient on its way to its place
    last = max(s.rows * s.P, s.H * s.P * (s.family == "gru"))
    total = packed + s.steps_backward + dgates + cells + borders + projection + last
    if not s.is_bfloat16:
        return total
    stashed = s.chunk if s.family != "elman" and s.stash == "gates" else 0
    window = 0 if s.family == "lstm" else s.rows * s.P
    inputs = s.rows * s.I * (1 if s.family == "elman" else 2)  # x, and its gradient while x is there
    rights = _paired_rights(s) if s.pairs else 0
    return total + stashed + window + 2 * s.weights + inputs + s.rows * s.P + rights


def _paired_rights(s: _Sizes) -> int:
    """Return the elements of what only pairs make a backward pack: the input's weights, and x or h before each step.

    But for Elman's that is when the gradient of x is gone.
    """
    weights = _padded(s.I) * s.deep(s.G * s.H)
    read = max(_padded(s.I), _padded(s.P)) * s.deep(s.rows)
    return weights + (read if s.family == "elman" else max(0, read - s.rows * s.I))


def _variant(given: Mapping[str, Any], *, backward: bool) -> int:
    s = _Sizes.of("lstm_variant", given)
    gates, normal, lean = s.rows * s.G * s.H, bool(given["layer_norm"]), s.stash != "gates"
    if not backward:
        panels = s.G * _padded(s.H) * s.P + _padded(s.G * s.H) * s.I
        products = 0 if normal and not lean else s.B * s.G * s.H
        projection = (_padded(s.P) + s.B) * s.H if s.P != s.H else 0
        return panels + projection + products + gates * lean + s.B * (2 * s.P + s.H)
    projection = s.rows * (s.P + s.H) + s.B * s.H if s.P != s.H else 0
    chunks = (2 if normal or lean else 1) * gates + s.rows * s.H * (1 + lean)
    return s.matrices * lean + s.steps_backward + chunks + projection + 2 * s.B * s.G * s.H
