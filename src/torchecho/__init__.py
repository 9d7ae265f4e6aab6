"""torchecho makes a PyTorch training step fit the memory you have.

The public names are resolved when they are first used, so that importing a room that needs no torch does not import it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchecho import nn
    from torchecho.api import Measurement, budget, disable, measure, optimize, plan, plans
    from torchecho.errors import BudgetError, EchoError, EchoWarning, OptionError
    from torchecho.planner.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "EchoError",
    "EchoWarning",
    "Measurement",
    "OptionError",
    "Plan",
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
    **dict.fromkeys(("BudgetError", "EchoError", "EchoWarning", "OptionError"), "torchecho.errors"),
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
