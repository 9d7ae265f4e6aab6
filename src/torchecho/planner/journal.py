"""The plans that this process has made, oldest first: what `torchecho.plans()` returns."""

import dataclasses

from torchecho.planner.plan import Plan

# The one piece of state in this room: a log that reports read and nothing decides by.
_plans: list[Plan] = []


def record(plan: Plan) -> int:
    """Add a plan to the journal and return its number."""
    _plans.append(plan)
    return len(_plans) - 1


def amend(number: int, *, measured_peak_bytes: int) -> Plan:
    """Note in the journal what a plan's step was measured to use, and return the plan with it."""
    _plans[number] = dataclasses.replace(_plans[number], measured_peak_bytes=measured_peak_bytes)
    return _plans[number]


def replace(number: int, plan: Plan) -> None:
    """Put a plan in the place of the one of a number: it was made of the same step by a longer search."""
    _plans[number] = plan


def entry(number: int) -> Plan:
    """Return the plan of a number."""
    return _plans[number]


def plans() -> list[Plan]:
    """Return every plan made by this process, newest last."""
    return list(_plans)
