"""Tell how fast recurrent layers can be on this machine at best, next to how fast torch.nn's and torchecho's are.

Run as `python -m bench.rnn_limits` (`--layers gru "packed lstm"`, `--pairs 7`, `--json FILE`).

The least time of a step is that of its matrix products, each at the best rate of any library for exactly its sizes, and
of its activations at the rate of a chunk in the cache. Memory, synchronisation and PyTorch's own work count as nothing.
Times are the shortest of several; the speed is the median of steps in turns.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
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
_ROUNDS = 9
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
    def flops(self) -> float:
        """Return the FLOPs of one call."""
        return 2.0 * self.rows * self.depth * self.columns


def products(stack: Stack, stash: str, num_rows: int) -> Iterator[Product]:
    """Yield the products of a forward and a backward over a batch of so many rows in all its steps."""
    family, H, B = stack.layer.split()[-1], stack.H, stack.B
    P = H // 2 if stack.layer.startswith("projected") else H
    width, chunk_rows = GATES[family] * H, min(num_rows, B * default_chunk_steps(B, H))
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


class Rates:
    """Measured rates, each measured once."""

    def __init__(self) -> None:
        self._flops_per_second: dict[tuple[bool, int, int, int], float] = {}
        self._activations_per_second: float | None = None

    def flops_per_second(self, product: Product) -> float:
        """Return the best rate of the kernels, of PyTorch's BLAS and of oneDNN for a product."""
        transposed = product.phase == "weight gradients"
        key = (transposed, product.rows, product.depth, product.columns)
        if key not in self._flops_per_second:
            self._flops_per_second[key] = product.flops / _best_seconds(product, transposed=transposed)
        return self._flops_per_second[key]

    def activations_per_second(self) -> float:
        """Return the rate of the kernels' own activations, in the forward of a small layer without its products."""
        if self._activations_per_second is None:
            self._activations_per_second = _activation_rate()
        return self._activations_per_second


def _best_seconds(product: Product, *, transposed: bool) -> float:
    rows, depth, columns = product.rows, product.depth, product.columns
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
    repeats = max(1, int(_FLOPS_A_ROUND / product.flops))
    best = float("inf")
    for _ in range(_ROUNDS):
        for way in ways:
            start = time.perf_counter()
            for _ in range(repeats):
                way()
            best = min(best, (time.perf_counter() - start) / repeats)
    return best


def _activation_rate() -> float:
    """Return activations a second of a layer so narrow that its products take next to nothing of a step."""
    T, B, H = 64, 4096, 16
    x, weights = torch.randn(T, B, 1), [torch.randn(4 * H, 1), torch.zeros(4 * H, H)]
    h, c = torch.zeros(1, B, H), torch.zeros(1, B, H)
    with torch.no_grad():
        seconds = min(seconds_of(lambda: lstm(x, None, h, c, weights, "lean")) for _ in range(_ROUNDS))
    return 5.0 * T * B * H / seconds


def least_seconds(stack: Stack, stash: str, num_rows: int, rates: Rates) -> dict[str, float]:
    """Return the least seconds of each phase of a step."""
    phases: dict[str, float] = {}
    for product in products(stack, stash, num_rows):
        seconds = product.total_flops / rates.flops_per_second(product)
        phases[product.phase] = phases.get(product.phase, 0.0) + seconds
    family = stack.layer.split()[-1]
    forward, backward = ACTIVATIONS[family]
    rebuilt = (GATES[family] if stash == "lean" and family != "rnn" else 0) + backward
    activations = (forward + rebuilt) * num_rows * stack.H * stack.layers
    return {**phases, "activations": activations / rates.activations_per_second()}


def measure(stack: Stack, rates: Rates, pairs: int) -> list[dict[str, Any]]:
    """Return a row for each stash mode: FLOPs, least seconds by phase, speeds against torch.nn, had and possible."""
    trials = make_trials(asdict(stack))
    num_rows = trials["torch.nn"].gradient.shape[:-1].numel()
    seconds: dict[str, list[float]] = {name: [] for name in trials}
    for trial in trials.values():
        trial.step()
    for _ in range(pairs):
        for name, trial in trials.items():
            seconds[name].append(seconds_of(trial.step))
    theirs = seconds["torch.nn"]
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
    rates, rows = Rates(), []
    print("| layer, T, B, H, layers | stash | GFLOP | torch.nn ms | ms | least ms | GFLOP/s | speed | possible |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for stack in EXTENTS["full"].stacks:
        if arguments.layers and stack.layer not in arguments.layers:
            continue
        stashes = tuple(stash for stash in stack.stashes if stash in ("gates", "lean"))
        found = measure(replace(stack, stashes=stashes), rates, arguments.pairs)
        rows += found
        print("\n".join(_line(stack, row) for row in found), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
