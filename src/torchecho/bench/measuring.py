"""Measure configurations of a workload: peak, time against a reference of the same lowering, and whether bits agree."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchecho.api import measure, plans
from torchecho.bench.example import load_example, read_pairs
from torchecho.bench.plan_fields import plan_fields
from torchecho.bench.processes import Tell
from torchecho.bench.training import Forward, Snapshot, Training, make_forward, paired_seconds
from torchecho.engine.eager import SHORT_SEARCH
from torchecho.meter.step import seconds_of

_SEED = 0
_REFERENCE = {"system": "torchecho", "setting": "max_slowdown=0", "options": {"max_slowdown": 0, "lowering": "eager"}}


def make_training(size: Mapping[str, int], language: str = "vi") -> Training:
    """Build the translator and one batch without padding, of real text."""
    example = load_example()
    pairs, _ = example.corpus.split(read_pairs(example, language, None))
    vocab = example.batches.build_vocabularies(pairs)
    batch = example.batches.fixed_batch(size["batch"], size["source_steps"], size["target_steps"], vocab, _SEED, pairs)
    hidden = size["hidden"]
    model = example.train.make_model(example.model.ModelSize(hidden, hidden), vocab, _SEED)
    return Training(model, example.train.make_optimizer(model), batch)


def configuration(
    tell: Tell,
    *,
    size: Mapping[str, int],
    system: Mapping[str, Any],
    reference: Mapping[str, Any] | None = None,
    pairs: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure one configuration of the translator, and pair it with its reference."""
    return measure_training(tell, make_training(size).to(device), system, reference, pairs)


def measure_training(
    tell: Tell, training: Training, system: Mapping[str, Any], reference: Mapping[str, Any] | None, pairs: int
) -> dict[str, Any]:
    """Measure a training under one system, and pair it with its reference."""
    forward = _forward_of(training, system)
    row = _row_of(training, forward, system, tell)
    if reference is None:
        snapshot = Snapshot(training, _SEED)
        row["loss"] = snapshot.step(forward)[0]
        row["seconds"] = [seconds_of(lambda: training.step(forward)) for _ in range(pairs)]
    else:
        plain = _forward_of(training, reference)
        # Other layers sum in another order: their bits are compared with their own without recomputation.
        same_layers = training.converted().model if system.get("converted") else plain
        row |= _against(training, forward, plain, same_layers, pairs, tell)
    row["seconds_median"] = statistics.median(row["seconds"])
    return row


def _forward_of(training: Training, system: Mapping[str, Any]) -> Forward:
    trained = training.converted() if system.get("converted") else training
    return make_forward(trained, system["system"], system.get("fraction"), system.get("options", {}))


def seconds_of_first(training: Training, forward: Forward) -> float:
    """Return the seconds of the first step, and go on until what it was planned by is a whole search."""
    num_plans = len(plans())
    seconds = seconds_of(lambda: training.step(forward))
    while plans()[num_plans:] and SHORT_SEARCH in plans()[-1].notes:
        training.step(forward)
    return seconds


def _row_of(training: Training, forward: Forward, system: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    compiles = system["system"] != "eager" and system.get("options", {}).get("engine") != "eager"
    if compiles:
        tell(f"compiling {system['system']} {system['setting']}")
    num_plans = len(plans())
    first_seconds = seconds_of_first(training, forward)
    measured = measure(lambda: training.step(forward), warmup=1)
    row: dict[str, Any] = {
        "params": training.num_parameters,
        "batch": len(training.batch[0]),
        "peak_bytes": measured.peak_bytes,
        "base_bytes": measured.base_bytes,
        "compile_seconds": first_seconds - measured.seconds if compiles else None,
        "first_seconds": None if compiles else first_seconds,
    }
    made = plans()[num_plans:]
    return row | plan_fields(made[-1]) if made else row


def _against(
    training: Training, forward: Forward, reference: Forward, same_layers: Forward, pairs: int, tell: Tell
) -> dict[str, Any]:
    tell("running the reference")
    training.step(reference)
    baseline = measure(lambda: training.step(reference), warmup=1)
    snapshot = Snapshot(training, _SEED)
    loss, parts = snapshot.step(forward)
    _, reference_parts = snapshot.step(same_layers)
    tell(f"timing {pairs} pairs of steps")
    seconds, reference_seconds = paired_seconds(lambda: training.step(forward), lambda: training.step(reference), pairs)
    ratios = [ours / theirs for ours, theirs in zip(seconds, reference_seconds, strict=True)]
    return {
        "baseline_peak_bytes": baseline.peak_bytes,
        "seconds": seconds,
        "overhead_measured": statistics.median(ratios) - 1,
        "grads_equal": parts == reference_parts,
        "loss": loss,
        "note": _differences(parts, reference_parts),
    }


def _differences(parts: Mapping[str, str], reference: Mapping[str, str]) -> str:
    different = [name for name in parts if parts[name] != reference[name]]
    return f"differs from the reference in {', '.join(different)}" if different else ""


def sweep(
    tell: Tell, *, size: Mapping[str, int], budgets: int, fractions: list[float], device: str = "cpu"
) -> list[dict[str, Any]]:
    """Measure evenly spaced budgets from the untouched peak to the floor, then PyTorch's own budgets, at one size.

    Returns:
        The rows of both; each is compared with the reference of its lowering.
    """
    training = make_training(size).to(device)
    forward = _forward_of(training, _REFERENCE)
    first = {**_REFERENCE, **_row_of(training, forward, _REFERENCE, tell)}
    snapshot = Snapshot(training, _SEED)
    first["loss"], parts = snapshot.step(forward)
    compared = _Sweep(training, snapshot, first["peak_bytes"], parts)
    top, floor = plans()[-1].baseline_peak_bytes, first["floor_bytes"]
    rows = [first]
    for index in range(budgets):
        options = {"memory_budget": top - (top - floor) * index // max(budgets - 1, 1), "lowering": "eager"}
        setting = f"budget {index + 1} of {budgets}"
        rows.append(compared.row({"system": "torchecho", "setting": setting, "options": options}, tell))
    stash_all = _compiled_anew(training, {"system": "stash_all"})
    peak_bytes = measure(lambda: training.step(stash_all), warmup=2).peak_bytes
    compared = _Sweep(training, snapshot, peak_bytes, snapshot.step(stash_all)[1])
    for fraction in fractions:
        system = {"system": "memory_budget", "setting": f"{fraction:g}", "fraction": fraction}
        rows.append(compared.row(system, tell))
    return rows


@dataclass(frozen=True, slots=True)
class _Sweep:
    """What the rows of a sweep have in common: the training, and what their reference needs and leaves behind."""

    training: Training
    snapshot: Snapshot
    baseline_peak_bytes: int
    reference: Mapping[str, str]

    def row(self, system: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
        forward = _compiled_anew(self.training, system)
        row = {**system, **_row_of(self.training, forward, system, tell)}
        loss, parts = self.snapshot.step(forward)
        row |= {"loss": loss, "baseline_peak_bytes": self.baseline_peak_bytes}
        return row | {"grads_equal": parts == self.reference, "note": _differences(parts, self.reference)}


def _compiled_anew(training: Training, system: Mapping[str, Any]) -> Forward:
    torch.compiler.reset()
    return _forward_of(training, system)
