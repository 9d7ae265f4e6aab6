"""The jobs of the eager workload; each runs in a process of its own."""

import gc
import random
import resource
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchecho.api import measure, plans
from torchecho.bench.calls import cost_of_calls
from torchecho.bench.eager_models import make_language_model
from torchecho.bench.measuring import make_training, measure_training
from torchecho.bench.processes import Tell
from torchecho.bench.training import Forward, Training, make_forward
from torchecho.engine import later
from torchecho.meter.probe import PeakProbe
from torchecho.meter.step import seconds_of
from torchecho.units import format_bytes, format_seconds

_SEED = 0


def language_model(
    tell: Tell,
    *,
    size: Mapping[str, int],
    system: Mapping[str, Any],
    reference: Mapping[str, Any] | None = None,
    pairs: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure one configuration of the language model, and pair it with its reference; tell what its plan notes."""
    row = measure_training(tell, make_language_model(**size, seed=_SEED).to(device), system, reference, pairs)
    if system["system"] == "torchecho":
        plan = plans()[-1]
        changed = f"{plan.num_recomputed} of {plan.num_ops} ops run again; the peak is at {plan.peak_step}"
        row["note"] = "; ".join(text for text in (row["note"], changed, *plan.notes) if text)
    return row


@dataclass(frozen=True, slots=True)
class _Step:
    """One batch: trained twice only following the plan that is there for it, then as it comes; and untouched.

    What it takes beyond following is what its length costs that nobody had planned for: being weighed, taking up a
    plan, planning beside it. What following takes beyond the untouched step is the plan's recomputation. The two that
    follow do the same, and they come first, since what is learned changes what is followed from then on: they tell how
    well such seconds can be told apart. Where `interruptions` are many, another program had the cores meanwhile.
    """

    size: tuple[int, int]
    seconds: float
    untouched_seconds: float
    following_seconds: tuple[float, float]
    peak_bytes: int
    interruptions: int

    @property
    def stall_seconds(self) -> float:
        """Seconds beyond the steps that only follow."""
        return self.seconds - statistics.mean(self.following_seconds)

    @property
    def noise_seconds(self) -> float:
        """Seconds between the two steps that only follow."""
        return abs(self.following_seconds[0] - self.following_seconds[1])

    @property
    def added_seconds(self) -> float:
        """Seconds beyond the untouched step."""
        return self.seconds - self.untouched_seconds


def lengths(tell: Tell, *, extent: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Train on batches of random lengths, the longest first: each as it comes, untouched, and only following."""
    longest = extent["longest"]
    training = make_training(longest).to(device)
    untouched = measure(lambda: training.step(training.model), warmup=2)
    budget = int(untouched.peak_bytes / extent["factor"])
    options = {"engine": "eager", "memory_budget": budget}
    forward = make_forward(training, "torchecho", None, options)
    first, *drawn = _sizes(extent)
    base_bytes = untouched.base_bytes
    of_first = _as_it_comes(_with(training, first), forward, base_bytes)[:2]
    steps = []
    for number, size in enumerate(drawn):
        steps.append(_step(_with(training, size), forward, size, base_bytes, untouched_first=number % 2 == 0))
        if number % 20 == 0:
            tell(f"{number} of {extent['batches']} batches, {len(plans())} plans")
    return _summary(of_first, steps, budget, untouched.peak_bytes, base_bytes)


def _sizes(extent: Mapping[str, Any]) -> list[tuple[int, int]]:
    longest, shortest = extent["longest"], extent["shortest"]
    draw = random.Random(_SEED)
    most = longest["source_steps"], longest["target_steps"]
    drawn = [(draw.randint(shortest, most[0]), draw.randint(shortest, most[1])) for _ in range(extent["batches"])]
    return [most, *drawn]


def _with(training: Training, size: tuple[int, int]) -> Training:
    """Return the same training with as many steps of its batch."""
    source, target_in, target_out = training.batch
    source_steps, target_steps = size
    batch = source[:, :source_steps], target_in[:, :target_steps], target_out[:, :target_steps]
    return Training(training.model, training.optimizer, [tensor.clone() for tensor in batch])


def _step(
    training: Training, forward: Forward, size: tuple[int, int], base_bytes: int, *, untouched_first: bool
) -> _Step:
    """Train one batch in all ways, and once more before, so that none is the first of its size.

    Planning beside the training stands still while the others are timed, so that it goes on as it would without.
    """

    def held_back(forward: Forward) -> float:
        with later.held_back():
            return seconds_of(lambda: training.step(forward))

    gc.collect()
    held_back(forward)
    before = held_back(training.model) if untouched_first else None
    following = held_back(forward), held_back(forward)
    seconds, peak_bytes, interruptions = _as_it_comes(training, forward, base_bytes)
    untouched = held_back(training.model) if before is None else before
    return _Step(size, seconds, untouched, following, peak_bytes, interruptions)


def _as_it_comes(training: Training, forward: Forward, base_bytes: int) -> tuple[float, int, int]:
    """Return the seconds of a step, its peak, and how often the system took a core from it.

    In the peak a shorter batch counts as the longest, which is on the safe side.
    """
    with PeakProbe(training.batch[0].device) as probe:
        before = _interruptions()
        seconds = seconds_of(lambda: training.step(forward))
        return seconds, base_bytes + probe.read(), _interruptions() - before


def _interruptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _summary(
    first: tuple[float, int], steps: Sequence[_Step], budget: int, untouched_bytes: int, base_bytes: int
) -> dict[str, Any]:
    first_seconds, first_peak_bytes = first
    over = [step for step in steps if step.peak_bytes > budget]
    worst = max(steps, key=lambda step: step.stall_seconds)
    stalls = _spread([step.stall_seconds for step in steps])
    noise = _spread([step.noise_seconds for step in steps])
    added = _spread([step.added_seconds for step in steps])
    figures = {
        "batches": len(steps),
        "batches_over_budget": len(over),
        "first_peak_bytes": first_peak_bytes,
        "plans": len(plans()),
        **{f"stall_seconds_{name}": value for name, value in stalls.items()},
        **{f"noise_seconds_{name}": value for name, value in noise.items()},
        **{f"added_seconds_{name}": value for name, value in added.items()},
        "untouched_seconds_median": statistics.median(step.untouched_seconds for step in steps),
        "interruptions_of_worst": worst.interruptions,
        "interruptions_median": statistics.median_low(step.interruptions for step in steps),
    }
    size = "/".join(map(str, worst.size))
    note = (
        f"{len(over)} of {len(steps)} batches over the budget after the first (which took"
        f" {format_bytes(first_peak_bytes)} and {format_seconds(first_seconds)}, planning included);"
        f" {len(plans())} plans; beyond the same step following the same plan: {_described(stalls)}"
        f" (at {size} steps, which take {format_seconds(statistics.mean(worst.following_seconds))}; the system took a"
        f" core from it {worst.interruptions} times, {figures['interruptions_median']} from half of them);"
        f" between two that follow it: {_described(noise)};"
        f" beyond a plain step, recomputation included: {_described(added)}"
    )
    return {
        "system": "torchecho",
        "setting": f"{format_bytes(budget)} (longest eager/{untouched_bytes / budget:.3g})",
        "engine": "eager",
        "baseline_peak_bytes": untouched_bytes,
        "budget_bytes": budget,
        "peak_bytes": max(step.peak_bytes for step in steps),
        "base_bytes": base_bytes,
        "seconds": [step.seconds for step in steps],
        "seconds_median": statistics.median(step.seconds for step in steps),
        "overhead_measured": sum(s.seconds for s in steps) / sum(s.untouched_seconds for s in steps) - 1,
        "first_seconds": first_seconds,
        "figures": figures,
        "note": note,
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    middle, p95 = statistics.median(ordered), ordered[round(0.95 * (len(ordered) - 1))]
    return {"max": ordered[-1], "p95": p95, "median": middle}


def _described(spread: Mapping[str, float]) -> str:
    middle, p95, most = (format_seconds(spread[name]) for name in ("median", "p95", "max"))
    return f"median {middle}, 95th percentile {p95}, at most {most}"


def calls(tell: Tell, *, num_ops: int, pairs: int) -> list[Mapping[str, Any]]:
    """Measure what the engine adds to each call of a step that is nothing but calls."""
    tell("timing calls")
    torch.manual_seed(_SEED)
    return cost_of_calls(num_ops, pairs)
