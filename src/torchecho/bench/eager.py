"""The eager workload: the eager engine beside plain eager PyTorch, on programs that are left as they are."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torchecho.bench.nmt import Steps
from torchecho.bench.processes import Tell, run_job
from torchecho.errors import BudgetError
from torchecho.report.results import ResultRow
from torchecho.units import format_bytes

_UNTOUCHED = {"system": "eager", "setting": "untouched"}
_FLOOR_SLOWDOWN = 100.0  # more than any plan adds: the smallest peak that the planner finds


@dataclass(frozen=True, slots=True)
class Words:
    """Shape of one batch of the language model, its width and its vocabulary."""

    steps: int
    batch: int
    hidden: int
    vocabulary: int

    def __str__(self) -> str:
        """Say it in words."""
        return (
            f"2-layer nn.LSTM language model, T={self.steps}, B={self.batch}, H={self.hidden}, {self.vocabulary} words"
        )


@dataclass(frozen=True, slots=True)
class Lengths:
    """Random lengths of the translator's batches.

    Attributes:
        longest: Shape of the first batch, which is the longest; the others are as wide.
        shortest: Fewest steps of a side.
        batches: How many batches follow the first.
        factor: The budget is plain eager PyTorch's peak on the longest, divided by this.
    """

    longest: Steps
    shortest: int
    batches: int
    factor: float


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured.

    Attributes:
        translator: Shapes of the translator, each with its budgets: the untouched peak divided by each factor.
        words: Shapes of the language model, likewise; the floor is measured too.
        lengths: Steps of random lengths.
        ops: Ops of the step whose calls are counted.
        pairs: Pairs of timed steps.
    """

    translator: tuple[tuple[Steps, tuple[float, ...]], ...]
    words: tuple[tuple[Words, tuple[float, ...]], ...]
    lengths: Lengths
    ops: int
    pairs: int


EXTENTS = {
    "full": Extent(
        translator=((Steps(64, 256, 48, 48), (2.8,)), (Steps(64, 256, 96, 96), (4.5,))),
        words=((Words(64, 32, 256, 200), (2.5,)), (Words(64, 32, 256, 20_000), ())),
        lengths=Lengths(Steps(64, 256, 96, 96), shortest=10, batches=200, factor=4.0),
        ops=4000,
        pairs=9,
    ),
    "tiny": Extent(
        translator=((Steps(64, 16, 3, 3), (1.5,)),),
        words=((Words(4, 4, 16, 20), ()),),
        lengths=Lengths(Steps(64, 16, 4, 4), shortest=2, batches=3, factor=1.2),
        ops=80,
        pairs=1,
    ),
}

# A GPU is not filled by the batches above, and what its libraries keep would be most of the peak.
_ON_CUDA = {
    "full": Extent(
        translator=((Steps(512, 256, 48, 48), (2.5, 4.0)), (Steps(512, 256, 96, 96), (4.5,))),
        words=((Words(64, 256, 512, 200), (2.5,)),),
        lengths=Lengths(Steps(512, 256, 96, 96), shortest=10, batches=100, factor=4.0),
        ops=4000,
        pairs=7,
    )
}


def run(size: str, tell: Tell, device: str = "cpu") -> list[ResultRow]:
    """Measure each configuration in a process of its own."""
    extent = (_ON_CUDA if device == "cuda" else {}).get(size, EXTENTS[size])
    rows: list[ResultRow] = []
    fixed = {"pairs": extent.pairs, "device": device}
    for steps, factors in extent.translator:
        rows += _configurations("configuration", steps, factors, fixed, tell, with_floor=False)
    for words, factors in extent.words:
        rows += _configurations("language_model", words, factors, fixed, tell, with_floor=True)
    label = f"{extent.lengths.batches} batches of {extent.lengths.shortest} to {extent.lengths.longest}"
    rows.append(_row(label, _job("lengths", {"extent": asdict(extent.lengths), "device": device}, "lengths", tell)))
    for found in _job("calls", {"num_ops": extent.ops, "pairs": extent.pairs}, "calls", tell):
        rows.append(_row(f"{extent.ops} ops on 16x16 numbers", found))
    return rows


def _configurations(
    job: str,
    shape: Steps | Words,
    factors: tuple[float, ...],
    fixed: Mapping[str, Any],
    tell: Tell,
    *,
    with_floor: bool,
) -> Iterator[ResultRow]:
    """Yield a row of plain eager PyTorch, and one for each budget that its peak gives."""
    arguments = {"size": asdict(shape), **fixed}
    untouched = _job(job, {**arguments, "system": _UNTOUCHED}, f"{shape}: untouched", tell)
    yield _row(str(shape), {**untouched, **_UNTOUCHED})
    for setting, options, converted in _settings(untouched["peak_bytes"], factors, with_floor=with_floor):
        system = {
            "system": "torchecho",
            "setting": setting,
            "options": {**options, "engine": "eager"},
            "converted": converted,
        }
        try:
            found = _job(
                job, {**arguments, "system": system, "reference": _UNTOUCHED}, f"{shape}: torchecho {setting}", tell
            )
        except BudgetError as error:
            found = {"note": str(error)}
        yield _row(str(shape), {**found, "system": "torchecho", "setting": setting, "engine": "eager"})


def _settings(
    untouched_bytes: int, factors: tuple[float, ...], *, with_floor: bool
) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield settings, options, and whether torchecho's recurrent layers take the place of PyTorch's."""
    for factor in factors:
        budget = int(untouched_bytes / factor)
        for with_layers, converted in (("", False), (", torchecho.nn", True)):
            yield f"{format_bytes(budget)} (eager/{factor:g}){with_layers}", {"memory_budget": budget}, converted
    if with_floor:
        yield "floor", {"max_slowdown": _FLOOR_SLOWDOWN}, False


def _job(job: str, arguments: Mapping[str, Any], label: str, tell: Tell) -> Any:
    tell(f"eager: {label}")
    return run_job(job, arguments, lambda text: tell(f"eager: {label}: {text}"))


def _row(size: str, found: Mapping[str, Any]) -> ResultRow:
    return ResultRow.from_dict({**found, "workload": "eager", "size": size, "lowering": None})
