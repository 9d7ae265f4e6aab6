"""Explain a plan in plain text: what is stashed, what is recomputed, what sits at the peak, the floor, the bound."""

from collections.abc import Sequence

from torchecho.planner.plan import Plan, Row
from torchecho.units import format_bytes, format_overhead, format_seconds

_MAX_ROWS = 12


def explain(plan: Plan) -> str:
    """Return the explanation of a plan, one table after the other."""
    lines = [*_headline(plan), ""]
    lines += _table("stashed for the backward", plan.stashed, seconds=False)
    lines += _table("recomputed in the backward", plan.recomputed, seconds=True)
    lines += _table(f"live at the peak, {plan.peak_step}", plan.at_peak, seconds=False)
    lines += _table(f"what makes up the floor, {format_bytes(plan.floor_bytes)}", plan.floor_parts, seconds=False)
    if plan.kept_reasons:
        lines.append("never recomputed: " + "; ".join(f"{reason} ({n})" for reason, n in plan.kept_reasons))
    return "\n".join(lines).rstrip()


def _headline(plan: Plan) -> list[str]:
    """Return the numbers of a plan, one line each."""
    saved = plan.baseline_peak_bytes / max(plan.predicted_peak_bytes, 1)
    where = "at this peak" if plan.budget_bytes is None else "inside the budget"
    lines = [
        (
            f"plan for {plan.name}: peak {format_bytes(plan.predicted_peak_bytes)} predicted,"
            f" untouched {format_bytes(plan.baseline_peak_bytes)} ({saved:.2f} times less),"
            f" floor {format_bytes(plan.floor_bytes)}"
        ),
        (
            f"step time {format_overhead(plan.overhead)} predicted; no plan in this order {where} adds less than"
            f" {format_overhead(plan.overhead_bound)}"
        ),
        (
            f"stash {format_bytes(plan.stash_bytes)} in {plan.num_stashed} storages (untouched"
            f" {format_bytes(plan.baseline_stash_bytes)}); {plan.num_recomputed} ops run again, of {plan.num_ops}"
        ),
    ]
    if plan.budget_bytes is not None:
        lines.append(f"budget {format_bytes(plan.budget_bytes)}")
    if plan.measured_peak_bytes is not None:
        lines.append(_measured(plan, plan.measured_peak_bytes))
    return lines + [f"note: {note}" for note in plan.notes]


def _measured(plan: Plan, measured: int) -> str:
    off = measured / max(plan.predicted_peak_bytes, 1) - 1
    missed = plan.budget_bytes is not None and measured > plan.budget_bytes
    verdict = "  BUDGET MISSED" if missed else ""
    return f"peak {format_bytes(measured)} measured, {off * 100:+.2f} % from the prediction{verdict}"


def _table(title: str, rows: Sequence[Row], *, seconds: bool) -> list[str]:
    total = f"{title}: {format_bytes(sum(row.bytes for row in rows))}"
    if seconds:
        total += f", {format_seconds(sum(row.seconds for row in rows))}"
    lines = [total]
    for row in rows[:_MAX_ROWS]:
        where = " ".join(part for part in (row.module, row.source) if part)
        cost = f"{format_seconds(row.seconds):>10}" if seconds else ""
        lines.append(f"  {format_bytes(row.bytes):>10}{cost}  {row.count:>5} x {row.target:<38} {where}".rstrip())
    if len(rows) > _MAX_ROWS:
        rest = rows[_MAX_ROWS:]
        lines.append(f"  {format_bytes(sum(row.bytes for row in rest)):>10}  in {len(rest)} more rows")
    return [*lines, ""]
