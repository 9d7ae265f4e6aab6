"""The demo's jobs: train the translator for some steps, and find the largest batch that a budget holds."""

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchecho.api import measure, optimize, plan, plans
from torchecho.bench.example import Example, load_example, read_pairs
from torchecho.bench.plan_fields import plan_fields
from torchecho.bench.processes import Tell
from torchecho.errors import OptionError
from torchecho.meter.step import seconds_of

_TIMED_STEPS = 5
_LOWERING = "eager"  # generating code for the loop of the decoder would take minutes
_MAX_BATCH = 65_536


@dataclass(frozen=True, slots=True)
class _Course:
    """What one training run works with; every run of a setup draws the same numbers."""

    example: Example
    vocab: Any
    buckets: Any
    setup: Mapping[str, Any]

    def start(self, batch: int) -> "_Run":
        hidden, seed = self.setup["hidden"], self.setup["seed"]
        model = self.example.train.make_model(self.example.model.ModelSize(hidden, hidden), self.vocab, seed)
        batches = self.example.batches.make_batches(self.buckets, batch, seed)
        return _Run(self.example, model, self.example.train.make_optimizer(model), batches)


@dataclass(frozen=True, slots=True)
class _Run:
    example: Example
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Any]

    def step(self) -> float:
        return float(self.example.train.train_step(self.model, self.optimizer, next(self.batches)))


def _open_course(setup: Mapping[str, Any]) -> _Course:
    example = load_example()
    pairs = read_pairs(example, setup["language"], setup["corpus"])
    try:
        training, _ = example.corpus.split(pairs, seed=setup["seed"])
        vocab = example.batches.build_vocabularies(training)
        steps = example.batches.Bucket(*setup["bucket"])
        return _Course(example, vocab, example.batches.fill_buckets(training, vocab, [steps]), setup)
    except example.corpus.CorpusError as error:
        raise OptionError(str(error)) from None


def train(
    tell: Tell, *, setup: Mapping[str, Any], batch: int, steps: int, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Train for some steps, untouched when there are no options; then measure one more step.

    Returns:
        Fields of a result row.
    """
    run = _open_course(setup).start(batch)
    if options is not None:
        tell("compiling, which unrolls the loop of the decoder")
        optimize(run.model, dynamic=False, lowering=_LOWERING, optimizer=run.optimizer, **options)
    losses, seconds = [], []
    told = time.perf_counter()
    for number in range(1, steps + 1):
        started = time.perf_counter()
        losses.append(run.step())
        seconds.append(time.perf_counter() - started)
        if time.perf_counter() - told > 2:
            told = time.perf_counter()
            tell(f"step {number} of {steps}, loss {losses[-1]:.3f}")
    return {**_measured(run, batch, seconds[1:] or seconds), "losses": losses, "loss": losses[-1]}


def _measured(run: _Run, batch: int, seconds: list[float]) -> dict[str, Any]:
    measured = measure(run.step, warmup=1)
    made = plans()
    fields = {
        "batch": batch,
        "params": sum(parameter.numel() for parameter in run.model.parameters()),
        "peak_bytes": measured.peak_bytes,
        "base_bytes": measured.base_bytes,
        "seconds": seconds,
        "seconds_median": statistics.median(seconds),
    }
    return fields | plan_fields(made[-1]) if made else fields


def largest_eager_batch(tell: Tell, *, setup: Mapping[str, Any], budget_bytes: int) -> dict[str, Any] | None:
    """Find the largest batch whose untouched step stays inside the budget, by trying; None when not even one does."""
    course = _open_course(setup)

    def peak_bytes(batch: int) -> int:
        found = measure(course.start(batch).step, warmup=1).peak_bytes
        tell(f"batch {batch}: {found / 2**20:.1f} MiB")
        return found

    too_large = 1
    while too_large < _MAX_BATCH and peak_bytes(too_large) <= budget_bytes:
        too_large *= 2
    fits = too_large // 2
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        fits, too_large = (middle, too_large) if peak_bytes(middle) <= budget_bytes else (fits, middle)
    if fits == 0:
        return None
    run = course.start(fits)
    run.step()
    return _measured(run, fits, [seconds_of(run.step) for _ in range(_TIMED_STEPS)])


def floor_bytes(tell: Tell, *, setup: Mapping[str, Any], batch: int) -> int:
    """Return the smallest peak that any plan reaches for a batch, without running a step."""
    run = _open_course(setup).start(batch)
    tell(f"planning a batch of {batch} on fake tensors")
    return plan(run.model, next(run.batches), lowering=_LOWERING, optimizer=run.optimizer).floor_bytes
