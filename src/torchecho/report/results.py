"""What `bench` and `demo` found: rows of one run, and their JSON both ways."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torchecho.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One configuration of one workload; what it does not have, or was not measured, is None.

    Attributes:
        workload: Name in the registry.
        size: Size in words, such as "48/48 steps, B=64, H=256".
        system: `eager`, `checkpoint`, `compile`, `memory_budget`, `torchecho`, `planner`.
        setting: What the system was asked for.
        params: Numbers in the parameters.
        baseline_peak_bytes: Peak of the same lowering without recomputation.
        peak_bytes: Measured peak of the step, all that was live before it included.
        base_bytes: What was live before the measured step.
        seconds: Seconds of each timed step.
        overhead_predicted, overhead_measured, overhead_bound: Added seconds as a fraction of the reference's.
        grads_equal: Whether loss, gradients, parameters, buffers and random state equal the reference's bit for bit.
        loss: Loss of the compared step; in the demo the last one.
        losses: Loss of every step, where a run trains.
        first_seconds: Seconds of the first step, planning included, of a system that does not compile.
        figures: What only this workload measures, by name.
        note: What a reader should know of this row.
    """

    workload: str
    size: str
    system: str
    setting: str = ""
    engine: str | None = None
    lowering: str | None = None
    params: int | None = None
    batch: int | None = None
    baseline_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    peak_bytes: int | None = None
    seconds: tuple[float, ...] = ()
    seconds_median: float | None = None
    overhead_predicted: float | None = None
    overhead_measured: float | None = None
    overhead_bound: float | None = None
    planning_seconds: float | None = None
    compile_seconds: float | None = None
    nodes: int | None = None
    grads_equal: bool | None = None
    loss: float | None = None
    base_bytes: int | None = None
    budget_bytes: int | None = None
    floor_bytes: int | None = None
    losses: tuple[float, ...] = ()
    first_seconds: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def above_base_bytes(self) -> int | None:
        """Peak above what was live before the step."""
        return None if self.peak_bytes is None or self.base_bytes is None else self.peak_bytes - self.base_bytes

    @property
    def samples_per_second(self) -> float | None:
        """Samples of the batch that one second trains."""
        return self.batch / self.seconds_median if self.batch and self.seconds_median else None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Make a row of what JSON holds; names of other versions are dropped.

        Raises:
            TypeError: a field that every row has is missing.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        given = {name: value for name, value in data.items() if name in known}
        for name in ("seconds", "losses"):
            given[name] = tuple(given.get(name, ()))
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Results:
    """The rows of one run, and the machine that they were measured on."""

    torchecho: str
    torch: str
    device: str
    threads: int
    rows: tuple[ResultRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the run."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Return the run as JSON text; `from_json` reads it back."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a run that `to_json` wrote.

        Raises:
            OptionError: the text is not such a run.
        """
        try:
            data = json.loads(text)
            rows = tuple(ResultRow.from_dict(row) for row in data["rows"])
            return cls(data["torchecho"], data["torch"], data["device"], data["threads"], rows)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OptionError(f"cannot read the results: {error}; give what bench or demo --json wrote") from None


def sweep_faults(rows: Sequence[ResultRow]) -> list[str]:
    """Say what breaks the promises of a sweep of falling budgets; empty when nothing does.

    Args:
        rows: Rows with a budget, in any order; others are left out.
    """
    sweep = sorted((r for r in rows if r.budget_bytes is not None), key=lambda r: -(r.budget_bytes or 0))
    faults = [f"{r.setting}: measured {r.peak_bytes} B is over the budget" for r in sweep if _is_over(r)]
    for larger, smaller in itertools.pairwise(sweep):
        if larger.budget_bytes == smaller.budget_bytes:
            continue  # other layers, and no step of the sweep
        if (smaller.peak_bytes or 0) > (larger.peak_bytes or 0):
            faults.append(f"{smaller.setting}: measured peak rises from {larger.peak_bytes} to {smaller.peak_bytes} B")
        if (smaller.overhead_predicted or 0.0) < (larger.overhead_predicted or 0.0):
            faults.append(f"{smaller.setting}: predicted overhead falls below that of {larger.setting}")
    return faults


def _is_over(row: ResultRow) -> bool:
    return row.peak_bytes is not None and row.budget_bytes is not None and row.peak_bytes > row.budget_bytes
