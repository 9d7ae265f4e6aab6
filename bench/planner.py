"""Measure the planner: seconds, memory, and how near its plans come to the bound, on large synthetic graphs.

Run as `python -m bench.planner` (`--sizes 1000 10000`, `--families unet`, `--json FILE`).
"""

import argparse
import json
import math
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.graphs import FAMILIES, make
from torchecho.planner.planner import Archive, make_archive, overhead_bound

BUDGETS = (0.8, 0.6, 0.4, 0.3, 0.2)
SIZES = (1_000, 10_000, 50_000)
MAX_SECONDS = {10_000: 10.0, 50_000: 60.0}
MAX_MEMORY_BYTES = 2**30


def run(
    *,
    families: Sequence[str] = tuple(FAMILIES),
    sizes: Sequence[int] = SIZES,
    with_memory: bool = True,
    tell: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Return a row for each family, size and budget, telling of each graph; memory comes from a second, traced run."""
    rows: list[dict[str, Any]] = []
    for family in families:
        for size in sizes:
            tell(f"planning a {family} of about {size} ops")
            graph, costs = make(family, size)
            wall, cpu = time.perf_counter(), time.process_time()
            archive = make_archive(graph, costs)
            shared = {
                "workload": family,
                "nodes": len(graph.ops),
                "planning_seconds": time.perf_counter() - wall,
                "cpu_seconds": time.process_time() - cpu,
                "memory_bytes": _traced_bytes(family, size) if with_memory else None,
            }
            rows += [{**shared, **_at_budget(archive, budget)} for budget in BUDGETS]
    return rows


def _at_budget(archive: Archive, budget: float) -> dict[str, Any]:
    """Return what the archive answers for a budget given as a share of the untouched step's peak."""
    budget_bytes = int(budget * archive.baseline_peak_bytes)
    fitting = [c for c in archive.candidates if c.peak_bytes <= budget_bytes]
    best = min(fitting, key=lambda c: c.added_seconds, default=None)
    bound = overhead_bound(archive, budget_bytes)
    return {
        "budget": budget,
        "floor": archive.floor_bytes / archive.baseline_peak_bytes,
        "peak": None if best is None else best.peak_bytes / archive.baseline_peak_bytes,
        "overhead": None if best is None else best.added_seconds / archive.search.baseline_seconds,
        "overhead_bound": None if math.isinf(bound) else bound,
        "origin": "" if best is None else best.origin,
    }


def _traced_bytes(family: str, size: int) -> int:
    graph, costs = make(family, size)
    tracemalloc.start()
    make_archive(graph, costs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return one Markdown line a graph: overhead found / bound at each budget, in percent."""
    head = "| graph | ops | seconds | CPU seconds | memory | floor | " + " | ".join(f"{b:g}" for b in BUDGETS) + " |"
    lines = [head, "|---|--:|--:|--:|--:|--:|" + "--:|" * len(BUDGETS)]
    for first in range(0, len(rows), len(BUDGETS)):
        part = rows[first : first + len(BUDGETS)]
        row = part[0]
        memory = "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**20:.0f} MiB"
        cells = [f"{_percent(r['overhead'])} / {_percent(r['overhead_bound'])}" for r in part]
        size = f"{row['nodes']} | {row['planning_seconds']:.1f} | {row['cpu_seconds']:.1f} | {memory}"
        lines.append(f"| {row['workload']} | {size} | {row['floor']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{fraction * 100:.1f}"


def misses(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the bars that rows miss, in words."""
    found = []
    for row in rows[:: len(BUDGETS)]:
        allowed = min((s for size, s in MAX_SECONDS.items() if row["nodes"] <= 1.1 * size), default=math.inf)
        if row["planning_seconds"] > allowed:
            found.append(
                f"{row['workload']} of {row['nodes']} ops took {row['planning_seconds']:.1f} s, not {allowed:g} s"
            )
        if row["memory_bytes"] is not None and row["memory_bytes"] > MAX_MEMORY_BYTES:
            found.append(
                f"{row['workload']} of {row['nodes']} ops took {row['memory_bytes'] / 2**20:.0f} MiB, not 1024 MiB"
            )
    return found


def main() -> None:
    """Print the table and the bars missed, and write the rows as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=sorted(FAMILIES))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--no-memory", action="store_true", help="leave out the second, traced run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = run(families=arguments.families, sizes=arguments.sizes, with_memory=not arguments.no_memory)
    print(table(rows))
    for miss in misses(rows):
        print(f"missed: {miss}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
