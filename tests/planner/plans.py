"""Plan one graph alone, with a budget as users give it."""

from torchecho.planner.alternatives import make_plan_among
from torchecho.planner.plan import Plan
from torchecho.planner.planner import Archive, budget_in_bytes


def make_plan(archive: Archive, budget: float | None, max_slowdown: float | None, *, name: str = "step") -> Plan:
    """Return the plan of an archive; a float is a fraction of the untouched step's peak."""
    return make_plan_among([archive], budget_in_bytes(archive, budget), max_slowdown, name=name)[1]
