"""The plan: which storages are stashed, which ops run again, and what that costs and saves. Plain data."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torchecho.errors import PlanError
from torchecho.ir.schedule import Schedule

FORMAT = 1
_WANTED = "it must be the text that Plan.to_json() returns"


@dataclass(frozen=True, slots=True)
class Row:
    """Alike storages or ops of one place in the program, added up.

    Attributes:
        target: The op that makes them, or the category of what no op makes.
        count: How many of them.
        bytes: Their bytes together.
        seconds: Their ops' seconds together.
    """

    target: str
    module: str
    source: str
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What was decided for one training graph, and what it predicts.

    Attributes:
        graph_hash: Identity of the graph that the schedule belongs to.
        budget_bytes: Budget that was asked for; None when only a slowdown was.
        baseline_peak_bytes: Predicted peak of the untouched step.
        predicted_peak_bytes: Predicted peak of this plan.
        measured_peak_bytes: Peak of the first real step; None before it.
        floor_bytes: Smallest peak that any plan found reaches.
        overhead: Predicted added seconds as a fraction of the untouched step's.
        overhead_bound: No plan in this order inside the budget can add less; without a budget none at this peak.
        frontier: (peak bytes, overhead) of every plan that no other beats, largest peak first.
        stashed, recomputed, at_peak, floor_parts: Explanations, largest first.
        reuse_windows: (op, ticks that its copies may wait for their next use) of every recomputed op.
        floor_windows: The same for the plan that reaches the floor.
        notes: What the user should know about this plan.
    """

    graph_hash: str
    schedule: Schedule
    budget_bytes: int | None
    max_slowdown: float | None
    baseline_peak_bytes: int
    predicted_peak_bytes: int
    floor_bytes: int
    overhead: float
    overhead_bound: float
    baseline_seconds: float
    stash_bytes: int
    baseline_stash_bytes: int
    num_recomputed: int
    num_stashed: int
    num_ops: int
    planning_seconds: float
    peak_step: str
    frontier: tuple[tuple[int, float], ...]
    stashed: tuple[Row, ...]
    recomputed: tuple[Row, ...]
    at_peak: tuple[Row, ...]
    floor_parts: tuple[Row, ...]
    kept_reasons: tuple[tuple[str, int], ...]
    reuse_windows: tuple[tuple[int, int], ...] = ()
    floor_windows: tuple[tuple[int, int], ...] = ()
    name: str = "step"
    lowering: str = ""
    measured_peak_bytes: int | None = None
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        """Return the plan as JSON text; `from_json` reads it back."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a plan that `to_json` wrote.

        Raises:
            PlanError: the text is not such a plan.
        """
        data = _fields(text)
        try:
            return cls(**_revive(data))
        except KeyError as error:
            raise PlanError(f"cannot read the plan: it has no {error}; {_WANTED}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise PlanError(f"cannot read the plan: {error}; {_WANTED}") from error

    def explain(self) -> str:
        """Return a table of what is stashed and recomputed, by module and source line, with bytes and seconds."""
        from torchecho.planner.explain import explain  # noqa: PLC0415 - explain reads plans, so it stands above this module

        return explain(self)


def _fields(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, TypeError) as error:
        raise PlanError(f"cannot read the plan: it is no JSON ({error}); {_WANTED}") from error
    if not isinstance(data, dict) or "format" not in data:
        raise PlanError(f"cannot read the plan: it is JSON of something else, without a format; {_WANTED}")
    if data.pop("format") != FORMAT:
        raise PlanError("the plan was written by another version of torchecho: make it anew")
    return data


def _revive(data: Mapping[str, Any]) -> dict[str, Any]:
    schedule = data["schedule"]
    revived = dict(data)
    revived["schedule"] = Schedule(tuple(schedule["steps"]), schedule["num_forward"])
    for name in ("stashed", "recomputed", "at_peak", "floor_parts"):
        revived[name] = tuple(Row(**row) for row in data[name])
    for name in ("frontier", "kept_reasons", "reuse_windows", "floor_windows"):
        revived[name] = tuple(tuple(pair) for pair in data[name])
    revived["notes"] = tuple(data["notes"])
    return revived
