"""The planner workload: how fast and how well large synthetic graphs are planned."""

from typing import Any

from torchecho.bench.processes import Tell, run_job
from torchecho.report.results import ResultRow
from torchecho.units import format_bytes

_SETTINGS: dict[str, dict[str, Any]] = {"full": {}, "tiny": {"sizes": [200], "with_memory": False}}


def run(size: str, tell: Tell, _device: str = "cpu") -> list[ResultRow]:
    """Return a row for each family of graphs, number of ops and budget; peaks are fractions there, not bytes."""
    tell("planner: a minute or two for each family of graphs")
    found = run_job("planner", {"settings": _SETTINGS[size]}, tell)
    return [_row(row) for row in found]


def _row(found: dict[str, Any]) -> ResultRow:
    memory = found.get("memory_bytes")
    parts = (
        None if found["peak"] is None else f"peak {found['peak']:.1%} of untouched",
        f"floor {found['floor']:.1%}",
        f"planner used {format_bytes(memory)}" if memory else None,
    )
    return ResultRow(
        workload="planner",
        size=f"{found['workload']}, {found['nodes']} ops",
        system="torchecho",
        setting=f"budget {found['budget']:.0%}",
        overhead_predicted=found["overhead"],
        overhead_bound=found["overhead_bound"],
        planning_seconds=found["planning_seconds"],
        nodes=found["nodes"],
        note=", ".join(part for part in parts if part),
    )
