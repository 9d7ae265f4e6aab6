"""What the user is told when a step is over the budget."""

from torchecho.engine.notice import warn
from torchecho.planner.plan import Plan
from torchecho.units import format_bytes


def tell_of_step(plan: Plan, peak_bytes: int, then: str) -> None:
    """Warn if a step that followed a plan was over the budget; `then` says why, or what to do."""
    if plan.budget_bytes is None or peak_bytes <= plan.budget_bytes:
        return
    warn(
        f"{plan.name}: measured peak {format_bytes(peak_bytes)} is over the budget {format_bytes(plan.budget_bytes)}"
        f" ({format_bytes(plan.predicted_peak_bytes)} was predicted): {then}"
    )


def tell_of_first_step(plan: Plan, peak_bytes: int, ahead: str) -> None:
    """Warn if a step that ran before there was a plan was over the budget; `ahead` says how it could have had one."""
    if plan.budget_bytes is None or peak_bytes <= plan.budget_bytes:
        return
    warn(
        f"{plan.name}: the first step, which ran before there was a plan, took {format_bytes(peak_bytes)}, over the"
        f" budget {format_bytes(plan.budget_bytes)} that later ones keep ({format_bytes(plan.predicted_peak_bytes)}"
        f" predicted): raise the budget to that{ahead and f', or {ahead}'}"
    )


def tell_of_plan(plan: Plan) -> None:
    """Warn if no plan keeps steps of a size inside the budget."""
    if plan.budget_bytes is None or plan.predicted_peak_bytes <= plan.budget_bytes:
        return
    warn(
        f"{plan.name}: steps of this size need {format_bytes(plan.predicted_peak_bytes)} at least, more than the budget"
        f" {format_bytes(plan.budget_bytes)}: make the longest batches smaller"
    )
