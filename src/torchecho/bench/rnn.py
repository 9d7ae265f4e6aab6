"""The rnn workload: torchecho's recurrent layers beside torch.nn's, in one process and in turns."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torchecho.bench.processes import Tell, run_job
from torchecho.report.results import ResultRow

_DENSE = ((50, 64, 512, 1), (100, 32, 256, 2), (35, 20, 650, 2), (64, 128, 128, 1), (35, 20, 200, 2))


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack of recurrent layers and its batch: T steps, B sequences, H inputs and units, in so many layers.

    Attributes:
        layer: ``lstm``, ``gru``, ``rnn``, ``packed lstm`` (lengths from T down to T/3), ``projected lstm`` (to H/2),
            ``normalised lstm`` (against torch.nn's parts in a loop), or one of the first three after ``bfloat16``.
        stashes: The stash modes that are measured.
    """

    layer: str
    T: int
    B: int
    H: int
    layers: int
    stashes: tuple[str, ...] = ("gates", "lean")

    def __str__(self) -> str:
        """Say it in words."""
        return f"{self.layer}, T={self.T}, B={self.B}, H={self.H}, layers={self.layers}"


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured.

    Attributes:
        stacks: The stacks of layers.
        pairs: Timed steps of each, in turns.
        compiled: T, B, H of the model with a 2-layer LSTM that is compiled.
    """

    stacks: tuple[Stack, ...]
    pairs: int
    compiled: tuple[int, int, int]


def _full_stacks() -> Iterator[Stack]:
    for sizes in _DENSE:
        yield Stack("lstm", *sizes, stashes=("gates", "preact", "cell", "lean"))
    for layer in ("gru", "packed lstm", "projected lstm", "normalised lstm"):
        for sizes in _DENSE:
            yield Stack(layer, *sizes)
    for sizes in _DENSE:
        yield Stack("rnn", *sizes, stashes=("lean",))
    for layer in ("bfloat16 lstm", "bfloat16 gru"):
        for sizes in _DENSE:
            yield Stack(layer, *sizes)
    for sizes in _DENSE:
        yield Stack("bfloat16 rnn", *sizes, stashes=("lean",))
    yield Stack("lstm", 200, 32, 512, 4)


EXTENTS = {
    "full": Extent(tuple(_full_stacks()), 7, (100, 32, 256)),
    "tiny": Extent((Stack("lstm", 4, 2, 8, 2), Stack("packed lstm", 6, 3, 8, 1)), 1, (3, 2, 8)),
}


def run(size: str, tell: Tell, _device: str = "cpu") -> list[ResultRow]:
    """Measure each stack in a process of its own, then the compiled model in another."""
    extent = EXTENTS[size]
    rows = []
    for stack in extent.stacks:
        tell(f"rnn: {stack}")
        arguments = {"stack": asdict(stack), "pairs": extent.pairs}
        rows += [_row(stack, found) for found in run_job("rnn_layers", arguments, tell)]
    tell("rnn: compiling a model with a 2-layer lstm")
    T, B, H = extent.compiled
    found = run_job("rnn_compiled", {"T": T, "B": B, "H": H, "pairs": extent.pairs}, tell)
    rows += [_row(Stack("model with an lstm", T, B, H, 2), row) for row in found]
    return rows


def _row(stack: Stack, found: Mapping[str, Any]) -> ResultRow:
    sizes = {"T": stack.T, "B": stack.B, "H": stack.H, "layers": stack.layers}
    figures = {**sizes, **found["figures"]}
    return ResultRow.from_dict({**found, "workload": "rnn", "size": str(stack), "batch": stack.B, "figures": figures})
