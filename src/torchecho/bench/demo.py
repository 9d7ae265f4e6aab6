"""What the demo does, one fresh process after the other; needs no torch itself."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchecho.bench.processes import Tell, run_job
from torchecho.errors import BudgetError, OptionError
from torchecho.options import parse_options
from torchecho.report.results import ResultRow
from torchecho.units import format_bytes

_TIMED_STEPS = 5
_SHRINK = 32  # a batch that does not fit is followed by one smaller by this part
_ROOMY = 0.8
_ADAM_COPIES = 4  # of the parameters: themselves, their gradients, and Adam's two moments


@dataclass(frozen=True, slots=True)
class DemoSetup:
    """What is trained, and for how long.

    Attributes:
        memory_budget: Text of a budget; a fraction is one of the untouched step's measured peak.
        bucket: Padded lengths of source and target, in characters.
        corpus: Path of a file of SOURCE<TAB>TARGET lines; None for Django's catalogues.
    """

    memory_budget: str = "0.4"
    steps: int = 30
    batch: int = 64
    language: str = "vi"
    corpus: str | None = None
    bucket: tuple[int, int] = (24, 24)
    hidden: int = 256
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """Return what every job takes as ``setup``."""
        names = ("language", "corpus", "bucket", "hidden", "seed")
        return {name: getattr(self, name) for name in names}

    @property
    def size(self) -> str:
        """The size in words."""
        return f"{self.bucket[0]}/{self.bucket[1]} steps, H={self.hidden}"

    def budget_bytes(self, untouched_peak_bytes: int) -> int:
        """Return the budget in bytes.

        Raises:
            OptionError: it is neither bytes nor a fraction.
        """
        try:
            budget = parse_options({"memory_budget": self.memory_budget}).memory_budget
        except OptionError:
            budget = None
        if isinstance(budget, str) or budget is None:
            raise OptionError(
                "demo: --memory-budget takes bytes such as '64MiB', or a fraction of the untouched peak in (0, 1] such"
                f" as 0.4; got {self.memory_budget!r}"
            )
        return int(budget * untouched_peak_bytes) if isinstance(budget, float) else budget


@dataclass(frozen=True, slots=True)
class Demo:
    """The rows of a demo: three trainings from one seed, and the largest batches under the budget.

    Attributes:
        budget_bytes: The budget.
        untouched, reference, planned: Eager PyTorch; torchecho with nothing recomputed; torchecho under the budget.
        largest_untouched: None when no batch at all fits.
        roomy_planned: A batch a fifth smaller than the largest; None when that is no larger than the trained one.
    """

    budget_bytes: int
    untouched: ResultRow
    reference: ResultRow
    planned: ResultRow
    largest_untouched: ResultRow | None
    largest_planned: ResultRow
    roomy_planned: ResultRow | None

    @property
    def rows(self) -> tuple[ResultRow, ...]:
        """All rows, in the order in which they were measured."""
        trained = (self.untouched, self.reference, self.planned)
        enlarged = (self.largest_untouched, self.largest_planned, self.roomy_planned)
        return tuple(row for row in (*trained, *enlarged) if row is not None)


def run_demo(setup: DemoSetup, tell: Tell) -> Demo:
    """Train untouched, with nothing recomputed and under the budget, then enlarge the batch.

    Raises:
        OptionError: the text or the budget cannot be used.
        BudgetError: the budget cannot be reached.
    """
    setup.budget_bytes(1)  # a budget that cannot be read is told before anything is trained
    untouched = _train(setup, "eager", "untouched", None, tell)
    assert untouched.peak_bytes is not None, "every training is measured"
    budget_bytes = setup.budget_bytes(untouched.peak_bytes)
    planned_setting = f"budget {format_bytes(budget_bytes)}"
    reference = _train(setup, "torchecho", "max_slowdown=0", {"max_slowdown": 0}, tell)
    planned = _train(setup, "torchecho", planned_setting, {"memory_budget": budget_bytes}, tell)
    planned = _compared(planned, reference)
    largest_untouched = _largest_untouched(setup, budget_bytes, tell)
    largest = _largest_planned(setup, planned, budget_bytes, tell)
    roomy = _roomy_planned(setup, planned, largest, budget_bytes, tell)
    return Demo(budget_bytes, untouched, reference, planned, largest_untouched, largest, roomy)


def _largest_untouched(setup: DemoSetup, budget_bytes: int, tell: Tell) -> ResultRow | None:
    tell(f"untouched: looking for the largest batch inside {format_bytes(budget_bytes)}")
    arguments = {"setup": setup.arguments(), "budget_bytes": budget_bytes}
    found = run_job("largest_eager_batch", arguments, _under("untouched", tell))
    return _row(setup, "eager", "largest batch", found) if found else None


def _largest_planned(setup: DemoSetup, planned: ResultRow, budget_bytes: int, tell: Tell) -> ResultRow:
    """Foresee the largest batch from the floors of two, then train it; smaller ones follow where it does not fit."""
    assert planned.batch, "a training has a batch"
    assert planned.floor_bytes, "a planned training knows its floor"
    guess = guess_batch(planned, budget_bytes)
    tell(f"budget {format_bytes(budget_bytes)}: planning a batch of {guess}")
    floor = run_job("floor_bytes", {"setup": setup.arguments(), "batch": guess}, _under("planning", tell))
    batch = batch_between((planned.batch, planned.floor_bytes), (guess, floor), budget_bytes)
    while True:
        try:
            return _train_batch(setup, batch, "largest batch", budget_bytes, tell)
        except BudgetError:
            if batch <= planned.batch:
                return planned
            batch = max(planned.batch, batch - max(1, batch // _SHRINK))


def _roomy_planned(
    setup: DemoSetup, planned: ResultRow, largest: ResultRow, budget_bytes: int, tell: Tell
) -> ResultRow | None:
    """Train a somewhat smaller batch: at the floor little is left to choose, and the largest batch is there."""
    assert planned.batch, "a training has a batch"
    assert largest.batch, "a training has a batch"
    batch = int(largest.batch * _ROOMY)
    return _train_batch(setup, batch, "with some room", budget_bytes, tell) if batch > planned.batch else None


def _train_batch(setup: DemoSetup, batch: int, setting: str, budget_bytes: int, tell: Tell) -> ResultRow:
    tell(f"budget {format_bytes(budget_bytes)}: a batch of {batch}")
    arguments = {"setup": setup.arguments(), "batch": batch, "steps": _TIMED_STEPS}
    options = {"memory_budget": budget_bytes}
    found = run_job("train", {**arguments, "options": options}, _under(f"batch {batch}", tell))
    return _row(setup, "torchecho", setting, found)


def guess_batch(planned: ResultRow, budget_bytes: int) -> int:
    """Foresee the largest batch from the floor of one plan: all but weights, gradients and moments grows with it."""
    assert planned.params, "a training has parameters"
    assert planned.batch, "a training has a batch"
    assert planned.floor_bytes, "a planned training knows its floor"
    fixed_bytes = 4 * planned.params * _ADAM_COPIES
    growing_bytes = max(planned.floor_bytes - fixed_bytes, 1)
    return max(planned.batch + 1, int(planned.batch * (budget_bytes - fixed_bytes) / growing_bytes))


def batch_between(small: tuple[int, int], large: tuple[int, int], budget_bytes: int) -> int:
    """Return the batch at which the straight line through two (batch, floor bytes) points reaches the budget."""
    bytes_per_sample = max((large[1] - small[1]) / (large[0] - small[0]), 1.0)
    return max(small[0], int(small[0] + (budget_bytes - small[1]) / bytes_per_sample))


def _train(setup: DemoSetup, system: str, setting: str, options: Mapping[str, Any] | None, tell: Tell) -> ResultRow:
    tell(f"training {setting}, {setup.steps} steps")
    arguments = {"setup": setup.arguments(), "batch": setup.batch, "steps": setup.steps, "options": options}
    return _row(setup, system, setting, run_job("train", arguments, _under(setting, tell)))


def _under(setting: str, tell: Tell) -> Tell:
    return lambda text: tell(f"{setting}: {text}")


def _row(setup: DemoSetup, system: str, setting: str, fields: Mapping[str, Any]) -> ResultRow:
    engine = "compile" if system == "torchecho" else None
    names = {"workload": "nmt", "size": setup.size, "system": system, "setting": setting, "engine": engine}
    return ResultRow.from_dict({**fields, **names})


def _compared(planned: ResultRow, reference: ResultRow) -> ResultRow:
    return replace(
        planned,
        baseline_peak_bytes=reference.peak_bytes,
        grads_equal=planned.losses == reference.losses,
    )
