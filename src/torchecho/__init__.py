"""torchecho makes a PyTorch training step fit the memory you have.

What needs torch is resolved when it is first used, so that importing a room that needs none does not import it.
"""

from typing import TYPE_CHECKING, Any

from torchecho.errors import (
    ApplyError,
    BudgetError,
    BuildError,
    CaptureError,
    EchoError,
    EchoWarning,
    GraphError,
    MeasureError,
    OptionError,
    PlanError,
    RecomputeError,
    ScheduleError,
)

if TYPE_CHECKING:
    from torchecho import nn
    from torchecho.api import Measurement, budget, disable, measure, optimize, plan, plans
    from torchecho.planner.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "ApplyError",
    "BudgetError",
    "BuildError",
    "CaptureError",
    "EchoError",
    "EchoWarning",
    "GraphError",
    "MeasureError",
    "Measurement",
    "OptionError",
    "Plan",
    "PlanError",
    "RecomputeError",
    "ScheduleError",
    "__version__",
    "budget",
    "disable",
    "measure",
    "nn",
    "optimize",
    "plan",
    "plans",
]

_HOMES = {
    **dict.fromkeys(("Measurement", "budget", "disable", "measure", "optimize", "plan", "plans"), "torchecho.api"),
    "Plan": "torchecho.planner.plan",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that holds it."""
    import importlib

    if name == "nn":
        return importlib.import_module("torchecho.nn")
    if name not in _HOMES:
        raise AttributeError(f"module 'torchecho' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
