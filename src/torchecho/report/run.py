"""What `torchecho run` found: its JSON, and its summary as lines of text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchecho.planner.plan import Plan, Row
from torchecho.units import format_bytes, format_overhead, format_seconds

_MOST_ROWS = 5
_MOST_PLANS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run of a program under a budget.

    Attributes:
        program: The program and its arguments.
        exit_code: How the run ended.
        is_interrupted: The user interrupted it.
        error: What torchecho raised in the program; None where it raised nothing.
        steps: Training steps: of the optimizers, or backwards where there is none.
        plans: Every plan that was made meanwhile, oldest first.
    """

    torchecho: str
    torch: str
    device: str
    threads: int
    program: tuple[str, ...]
    exit_code: int
    is_interrupted: bool
    error: str | None
    steps: int
    plans: tuple[Plan, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the run."""
        return {
            "torchecho": self.torchecho,
            "torch": self.torch,
            "device": self.device,
            "threads": self.threads,
            "program": list(self.program),
            "exit_code": self.exit_code,
            "error": self.error,
            "steps": self.steps,
            "plans": [_plan_fields(plan) for plan in self.plans],
        }


def _plan_fields(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "lowering": plan.lowering,
        "budget_bytes": plan.budget_bytes,
        "max_slowdown": plan.max_slowdown,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "floor_bytes": plan.floor_bytes,
        "overhead_predicted": plan.overhead,
        "num_recomputed": plan.num_recomputed,
        "num_ops": plan.num_ops,
        "planning_seconds": plan.planning_seconds,
        "notes": list(plan.notes),
    }


def run_summary(result: RunResult) -> list[str]:
    """Return the summary of a run: for each module its first plan in full, the others in a line.

    There is none of a program that failed before its first step.
    """
    if result.exit_code and not result.steps:
        return []
    steps = f"{result.steps} training step{'' if result.steps == 1 else 's'}"
    if not result.plans:
        return [f"torchecho: {steps}; {_why_nothing(result)}"]
    lines = [f"torchecho: {steps}"]
    names: set[str] = set()
    for plan in result.plans[:_MOST_PLANS]:
        lines += _first(plan) if plan.name not in names else [_other(plan)]
        names.add(plan.name)
    if len(result.plans) > _MOST_PLANS:
        lines.append(f"  and {len(result.plans) - _MOST_PLANS} more plans (--json has them all)")
    return lines


def _why_nothing(result: RunResult) -> str:
    """Word why there is no plan, by what is known."""
    if result.is_interrupted:
        return "interrupted before a plan was made"
    if not result.steps:
        return "nothing was planned: no backward followed the forward of a module"
    return "nothing was planned: no backward followed the forward of a module, or a warning above says why"


def _first(plan: Plan) -> Iterator[str]:
    yield f"  {plan.name}: {_peaks(plan)}"
    if plan.budget_bytes is not None:
        yield f"    budget {format_bytes(plan.budget_bytes)}, floor {format_bytes(plan.floor_bytes)}"
    again = f"{plan.num_recomputed} of {plan.num_ops} ops run again"
    yield f"    step time {format_overhead(plan.overhead)} predicted; {again}"
    yield from _recomputed(plan.recomputed)
    for note in plan.notes:
        yield f"    note: {note}"


def _other(plan: Plan) -> str:
    # The compile engine plans pieces between graph breaks, the eager engine steps that begin otherwise than the first.
    return f"  {plan.name}, {'another piece' if plan.lowering else 'other steps'}: {_peaks(plan)}"


def _peaks(plan: Plan) -> str:
    measured = plan.measured_peak_bytes
    found = "not measured" if measured is None else f"{format_bytes(measured)} measured"
    less = plan.baseline_peak_bytes / max(plan.predicted_peak_bytes, 1)
    return (
        f"peak {format_bytes(plan.predicted_peak_bytes)} predicted, {found};"
        f" untouched {format_bytes(plan.baseline_peak_bytes)} ({less:.2f} times less)"
    )


def _recomputed(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows[:_MOST_ROWS]:
        where = " ".join(part for part in (row.module, row.source) if part)
        cost = f"{format_bytes(row.bytes):>10}{format_seconds(row.seconds):>10}"
        yield f"    {cost}  {row.count:>5} x {row.target:<38} {where}".rstrip()
    if len(rows) > _MOST_ROWS:
        rest = rows[_MOST_ROWS:]
        cost = f"{format_bytes(sum(r.bytes for r in rest)):>10}{format_seconds(sum(r.seconds for r in rest)):>10}"
        yield f"    {cost}  in {len(rest)} more rows"
