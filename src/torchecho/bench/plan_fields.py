"""What a result row takes from a plan."""

from typing import Any

from torchecho.planner.plan import Plan


def plan_fields(plan: Plan) -> dict[str, Any]:
    """Return the fields of a result row that a plan knows."""
    return {
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "overhead_predicted": plan.overhead,
        "overhead_bound": plan.overhead_bound,
        "planning_seconds": plan.planning_seconds,
        "nodes": plan.num_ops,
        "budget_bytes": plan.budget_bytes,
        "floor_bytes": plan.floor_bytes,
        "lowering": plan.lowering or None,
    }
