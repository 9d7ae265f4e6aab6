"""The nmt workload: the attention LSTM translator of ``examples/nmt``, characters, Adam."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torchecho.bench.processes import Tell, run_job
from torchecho.errors import BudgetError
from torchecho.report.results import ResultRow
from torchecho.units import format_bytes


@dataclass(frozen=True, slots=True)
class Steps:
    """Shape of one batch and width of the model."""

    batch: int
    hidden: int
    source_steps: int
    target_steps: int

    def __str__(self) -> str:
        """Say it in words."""
        return f"{self.source_steps}/{self.target_steps} steps, B={self.batch}, H={self.hidden}"


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured.

    Attributes:
        steps: Shape of the main table.
        factors: Budgets: eager PyTorch's measured peak divided by each of these.
        fractions: PyTorch's activation memory budgets in the main table.
        pairs: Pairs of timed steps.
        sweep_steps: Shape of the sweep.
        sweep_budgets: How many budgets it has.
        sweep_fractions: PyTorch's activation memory budgets in the sweep.
    """

    steps: Steps
    factors: tuple[float, ...]
    fractions: tuple[float, ...]
    pairs: int
    sweep_steps: Steps
    sweep_budgets: int
    sweep_fractions: tuple[float, ...]


EXTENTS = {
    "full": Extent(Steps(64, 256, 48, 48), (2.5, 4.0), (0.5,), 9, Steps(64, 64, 8, 8), 20, (1.0, 0.8, 0.6, 0.4, 0.2)),
    "tiny": Extent(Steps(64, 16, 3, 3), (1.5,), (0.5,), 1, Steps(64, 16, 2, 2), 3, (0.5,)),
}

_STASH_ALL = {"system": "stash_all", "setting": "nothing recomputed"}
_REFERENCE = {
    "system": "torchecho",
    "setting": "max_slowdown=0",
    "options": {"max_slowdown": 0, "lowering": "eager"},
}


def run(size: str, tell: Tell, device: str = "cpu") -> list[ResultRow]:
    """Measure the main table, each configuration in a process of its own, and the sweep."""
    extent = EXTENTS[size]
    fixed = {"size": asdict(extent.steps), "pairs": extent.pairs, "device": device}
    eager = _measure(extent.steps, {"system": "eager", "setting": "untouched"}, None, fixed, tell)
    assert eager.peak_bytes is not None, "every configuration is measured"
    rows = [eager]
    for system, reference in _configurations(extent, eager.peak_bytes):
        rows.append(_measure(extent.steps, system, reference, fixed, tell))
    tell(f"nmt: sweep of {extent.sweep_budgets} budgets at {extent.sweep_steps}")
    arguments = {
        "size": asdict(extent.sweep_steps),
        "budgets": extent.sweep_budgets,
        "fractions": extent.sweep_fractions,
        "device": device,
    }
    swept = run_job("sweep", arguments, lambda text: tell(f"nmt: sweep: {text}"))
    return rows + [_row(str(extent.sweep_steps), row, row) for row in swept]


_Configuration = tuple[Mapping[str, Any], Mapping[str, Any] | None]


def _configurations(extent: Extent, eager_peak_bytes: int) -> Iterator[_Configuration]:
    """Yield each configuration with its reference of the same lowering, which recomputes nothing that costs time.

    Ours that recomputes nothing has none: its recurrent layers are one op each, and whatever else runs unrolls them.
    """
    yield _REFERENCE, None
    for factor in extent.factors:
        budget = int(eager_peak_bytes / factor)
        setting = f"{format_bytes(budget)} (eager/{factor:g})"
        options = {"memory_budget": budget, "lowering": "eager"}
        yield {"system": "torchecho", "setting": setting, "options": options}, _REFERENCE
    yield {"system": "compile", "setting": "default partition"}, _STASH_ALL
    for fraction in extent.fractions:
        yield {"system": "memory_budget", "setting": f"{fraction:g}", "fraction": fraction}, _STASH_ALL


def _measure(
    steps: Steps,
    system: Mapping[str, Any],
    reference: Mapping[str, Any] | None,
    fixed: Mapping[str, Any],
    tell: Tell,
) -> ResultRow:
    label = f"nmt: {system['system']} {system['setting']}"
    tell(label)
    arguments = {**fixed, "system": system, "reference": reference}
    try:
        found = run_job("configuration", arguments, lambda text: tell(f"{label}: {text}"))
    except BudgetError as error:
        found = {"note": str(error)}
    return _row(str(steps), system, found)


def _row(size: str, system: Mapping[str, Any], found: Mapping[str, Any]) -> ResultRow:
    kind = system["system"]
    names = {"workload": "nmt", "size": size, "system": kind, "setting": system["setting"]}
    if kind != "eager":
        names |= {"engine": "compile", "lowering": "eager" if kind == "torchecho" else "aot_eager"}
    return ResultRow.from_dict({**found, **names})
