"""Tell how fast recurrent layers can be on this machine at best, next to how fast torch.nn's and torchecho's are.

Run as `python -m bench.rnn_limits` (`--layers gru "packed lstm"`, `--pairs 7`, `--json FILE`).

The least time of a step is that of its matrix products, each at the best rate of any library for exactly its sizes, and
of its activations at the rate of a chunk in the cache. Memory, synchronisation and PyTorch's own work count as nothing.
Times are the shortest of several; the speed is the median of steps in turns. The rates of a row are measured right
before and right after its steps, since a machine may be faster or slower a minute later.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchecho.bench.rnn import EXTENTS, Stack
from torchecho.bench.rnn_jobs import make_trials
from torchecho.meter.step import seconds_of
from torchecho.rnn import gemm
from torchecho.rnn.lstm.op import lstm
from torchecho.rnn.sequence import default_chunk_steps

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
#: Activations of a unit in a forward step and, where nothing is rebuilt, in a backward step.
ACTIVATIONS = {"lstm": (5, 1), "gru": (3, 0), "rnn": (1, 0)}
_PASSES = 4  # over all products, before and after the steps, so that what else the machine does spoils none
_ROUNDS = 3
_FLOPS_A_ROUND = 2e8  # about a millisecond


@dataclass(frozen=True)
class Product:
    """A matrix product as it is called; `total_flops` are those of all its calls in a step."""

    phase: str
    rows: int
    depth: int
    columns: int
    total_flops: float

    @property
    def key(self) -> tuple[int, int, int, bool]:
        """Return what its rate depends on: rows, depth, columns, and whether the left operand lies transposed."""
        return self.rows, self.depth, self.columns, self.phase == "weight gradients"


def products(stack: Stack, stash: str, num_rows: int) -> Iterator[Product]:
    """Yield the products of a forward and a backward over a batch of so many rows in all its steps."""
    family, H, B = stack.layer.split()[-1], stack.H, stack.B
    P = H // 2 if stack.layer.startswith("projected") else H
    width, chunk_rows = GATES[family] * H, B * min(stack.T, default_chunk_steps(B, H))
    for layer in range(stack.layers):
        I = P if layer else H  # noqa: E741 - inputs
        sizes = [
            ("input", chunk_rows, I, width),
            ("steps", B, P, width),
            ("steps backward", B, width, P),
            ("input gradient", chunk_rows, width, I),
            ("weight gradients", width, chunk_rows, I),
            ("weight gradients", width, chunk_rows, P),
        ]
        if P != H:
            sizes += [("projection", B, H, P), ("projection backward", B, P, H), ("weight gradients", P, chunk_rows, H)]
        if stash == "lean" and family != "rnn":
            sizes += [("rebuild", chunk_rows, I, width), ("rebuild", chunk_rows, P, width)]
        for phase, rows, depth, columns in sizes:
            whole = num_rows / (depth if phase == "weight gradients" else rows)
            yield Product(phase, rows, depth, columns, 2.0 * rows * depth * columns * whole)


@dataclass(frozen=True)
class Rates:
    """Measured rates."""

    flops_per_second: Mapping[tuple[int, int, int, bool], float]
    activations_per_second: float

    @staticmethod
    def of(wanted: Iterable[Product]) -> "Rates":
        """Measure the best rate of the kernels, of PyTorch's BLAS and of oneDNN for each product."""
        best: dict[tuple[int, int, int, bool], float] = {}
        keys = list(dict.fromkeys(product.key for product in wanted))
        for _ in range(_PASSES):
            for key in keys:
                best[key] = max(best.get(key, 0.0), _best_rate(*key))
        return Rates(best, _activation_rate())

    def or_better(self, other: "Rates") -> "Rates":
        """Return the better of two measurements of the same products."""
        flops = {key: max(rate, other.flops_per_second[key]) for key, rate in self.flops_per_second.items()}
        return Rates(flops, max(self.activations_per_second, other.activations_per_second))


def _best_rate(rows: int, depth: int, columns: int, transposed: bool) -> float:  # noqa: FBT001 - part of a key
    left = torch.randn(depth, rows).t() if transposed else torch.randn(rows, depth)
    right, out = torch.randn(depth, columns), torch.empty(rows, columns)
    weight = right.t().contiguous()
    packed = gemm.pack(weight)
    ways: list[Callable[[], Any]] = [
        lambda: gemm.product(out, left, right, by_kernels_only=True),
        lambda: gemm.product(out, left, packed, by_kernels_only=True),
        lambda: torch.mm(left, right, out=out),
        lambda: torch.mm(left, weight.t(), out=out),
        lambda: torch.ops.mkldnn._linear_pointwise(left, weight, None, "none", [], ""),  # noqa: SLF001 - for its speed
    ]
    flops = 2.0 * rows * depth * columns
    repeats, best = max(1, int(_FLOPS_A_ROUND / flops)), float("inf")
    for _ in range(_ROUNDS):
        for way in ways:
            start = time.perf_counter()
            for _ in range(repeats):
                way()
            best = min(best, (time.perf_counter() - start) / repeats)
    return flops / best


def _activation_rate() -> float:
    """Return activations a second of a layer so narrow that its products take next to nothing of a step."""
    T, B, H = 64, 4096, 16
    x, weights = torch.randn(T, B, 1), [torch.randn(4 * H, 1), torch.zeros(4 * H, H)]
    h, c = torch.zeros(1, B, H), torch.zeros(1, B, H)
    with torch.no_grad():
        seconds = min(seconds_of(lambda: lstm(x, None, h, c, weights, "lean")) for _ in range(_PASSES * _ROUNDS))
    return 5.0 * T * B * H / seconds


def least_seconds(stack: Stack, stash: str, num_rows: int, rates: Rates) -> dict[str, float]:
    """Return the least seconds of each phase of a step."""
    phases: dict[str, float] = {}
    for product in products(stack, stash, num_rows):
        seconds = product.total_flops / rates.flops_per_second[product.key]
        phases[product.phase] = phases.get(product.phase, 0.0) + seconds
    family = stack.layer.split()[-1]
    forward, backward = ACTIVATIONS[family]
    rebuilt = (GATES[family] if stash == "lean" and family != "rnn" else 0) + backward
    activations = (forward + rebuilt) * num_rows * stack.H * stack.layers
    return {**phases, "activations": activations / rates.activations_per_second}


def measure(stack: Stack, pairs: int) -> list[dict[str, Any]]:
    """Return a row for each stash mode: FLOPs, least seconds by phase, speeds against torch.nn, had and possible."""
    wanted = list(products(stack, "lean", stack.T * stack.B))
    before = Rates.of(wanted)
    trials = make_trials(asdict(stack))
    num_rows = trials["torch.nn"].gradient.shape[:-1].numel()
    seconds: dict[str, list[float]] = {name: [] for name in trials}
    for trial in trials.values():
        trial.step()
    for _ in range(pairs):
        for name, trial in trials.items():
            seconds[name].append(seconds_of(trial.step))
    rates, theirs = before.or_better(Rates.of(wanted)), seconds["torch.nn"]
    return [_row(stack, stash, num_rows, rates, theirs, seconds[stash]) for stash in stack.stashes]


def _row(
    stack: Stack, stash: str, num_rows: int, rates: Rates, theirs: list[float], ours: list[float]
) -> dict[str, Any]:
    phases = least_seconds(stack, stash, num_rows, rates)
    least = sum(phases.values())
    flops = sum(product.total_flops for product in products(stack, stash, num_rows))
    return {
        "stack": str(stack),
        "stash": stash,
        "flops": flops,
        "torch_seconds": min(theirs),
        "seconds": min(ours),
        "least_seconds": least,
        "flops_per_second": flops / (least - phases["activations"]),
        "phases": phases,
        "speed": statistics.median(t / o for t, o in zip(theirs, ours, strict=True)),
        "possible_speed": min(theirs) / least,
    }


def _line(stack: Stack, row: Mapping[str, Any]) -> str:
    cells = [
        f"{stack.layer}, {stack.T}, {stack.B}, {stack.H}, {stack.layers}",
        row["stash"],
        f"{row['flops'] / 1e9:.1f}",
    ]
    cells += [f"{1e3 * row[name]:.1f}" for name in ("torch_seconds", "seconds", "least_seconds")]
    cells += [f"{row['flops_per_second'] / 1e9:.0f}", f"{row['speed']:.2f}", f"{row['possible_speed']:.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", nargs="*", help="layers to measure, as the rnn benchmark calls them")
    parser.add_argument("--pairs", type=int, default=7, help="timed steps of each")
    parser.add_argument("--json", type=Path, help="write the rows to a file too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    stacks = [
        replace(stack, stashes=tuple(stash for stash in stack.stashes if stash in ("gates", "lean")))
        for stack in EXTENTS["full"].stacks
        if not arguments.layers or stack.layer in arguments.layers
    ]
    rows: list[dict[str, Any]] = []
    print("| layer, T, B, H, layers | stash | GFLOP | torch.nn ms | ms | least ms | GFLOP/s | speed | possible |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for stack in stacks:
        found = measure(stack, arguments.pairs)
        rows += found
        print("\n".join(_line(stack, row) for row in found), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
