"""Plan a captured graph with what is known of the step around it."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import fx

from torchecho.capture.fx import JointCapture
from torchecho.cost.model import OpCosts
from torchecho.errors import BudgetError
from torchecho.ir.graph import TrainingGraph
from torchecho.meter.capacity import auto_budget_bytes, total_bytes
from torchecho.meter.optimizer import BytesOfOptimizers
from torchecho.meter.pricing import OpCall, price
from torchecho.options import Options
from torchecho.planner.alternatives import floor_bytes, make_plan_among
from torchecho.planner.plan import Plan
from torchecho.planner.planner import Archive, budget_in_bytes, make_archive
from torchecho.units import format_bytes


@dataclass(frozen=True)
class Surroundings:
    """What the engine knows of the step beyond the graph.

    Attributes:
        options: What the user asked for.
        name: What plans are called; empty to call them after the first module of each graph.
        model_bytes: Bytes of all parameters and buffers of the model; 0 when only its graphs are known.
        optimizer: Bytes of the optimizer's state and step; zeros when it is not known.
        may_run: Whether ops may be run to measure them; False on fake tensors.
        on_plan: Called with each plan's number in the journal.
        while_planning: Is entered while the training waits for the plan of a name.
        waiting: Stash and input bytes of pieces of this step whose forward has run and whose backward has not.
    """

    options: Options
    name: str = ""
    model_bytes: int = 0
    optimizer: BytesOfOptimizers = field(default_factory=lambda: BytesOfOptimizers(list))
    may_run: bool = True
    on_plan: Callable[[int], None] | None = None
    while_planning: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext
    waiting: "weakref.WeakKeyDictionary[object, int]" = field(default_factory=weakref.WeakKeyDictionary)


def bytes_of_optimizer(options: Options) -> BytesOfOptimizers:
    """Return the bytes of the optimizer that the user named; zeros without one."""
    optimizer = options.optimizer
    found = BytesOfOptimizers(lambda: [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [])
    found.foresee()
    return found


class Part(Enum):
    """How much of the step a graph is: all of it, or a piece between graph breaks or backwards; or a later step."""

    WHOLE = "whole"
    MORE_FOLLOWS = "more follows"
    LAST = "last"
    OF_OTHER_SIZE = "of another size"
    SHARED = "shared with another backward"


CallOf = Callable[[int], OpCall]

_SPLIT = "a graph break splits the step; this piece is at its floor, over its share"
_OVER = {
    Part.MORE_FOLLOWS: _SPLIT,
    Part.LAST: _SPLIT,
    Part.SHARED: "what it saves for another backward is kept; it runs at its floor, over the budget",
    Part.OF_OTHER_SIZE: "steps of this size do not fit the budget; they run at their floor",
}


def plan_capture(capture: JointCapture, surroundings: Surroundings, *, name: str, part: Part = Part.WHOLE) -> Plan:
    """Price and plan a captured joint graph, as `plan_graph` does.

    Raises:
        BudgetError: no plan keeps the whole step inside the budget.
    """
    return plan_graph(*graph_and_calls(capture), device_of(capture.module), surroundings, name=name, part=part)


def graph_and_calls(capture: JointCapture) -> tuple[TrainingGraph, CallOf]:
    """Return the graph of a captured joint graph, and what returns the call of each op."""
    return capture.graph, functools.partial(_call_of, capture)


def plan_alternatives(
    graphs: Iterable[tuple[TrainingGraph, CallOf]],
    device: torch.device,
    surroundings: Surroundings,
    *,
    name: str,
    part: Part = Part.WHOLE,
) -> tuple[int, Plan]:
    """Price and plan graphs that compute the same, and choose among all their plans.

    Args:
        graphs: Graphs with the calls of their ops, as in `plan_graph`; the first is the untouched step. Each is priced
            before the next is asked for.
        device: Device that the step runs on.
        surroundings: What is known of the step beyond the graph.
        name: What the plan is called.
        part: How much of the step the graph is.

    Returns:
        Which graph the plan is of, and the plan.

    Raises:
        BudgetError: no plan keeps the whole step inside the budget.
    """
    options = surroundings.options
    archives = []
    for graph, call_of in graphs:
        costs = price(graph, call_of, cost=options.cost, device=device, may_run=surroundings.may_run)
        archives.append(_archive_of(graph, costs, surroundings))
    return _plan_among(archives, device, surroundings, name=name, part=part)


def plan_graph(
    graph: TrainingGraph,
    call_of: CallOf,
    device: torch.device,
    surroundings: Surroundings,
    *,
    name: str,
    part: Part = Part.WHOLE,
) -> Plan:
    """Price and plan a training graph.

    A piece that more pieces follow takes at most half of the room that the budget leaves, for theirs. A piece that
    cannot keep to the budget goes as low as it can, with a note, and so does a step of another size than the first; the
    first whole step raises.

    Args:
        graph: Graph to plan.
        call_of: Returns the function and the fake arguments of the op of an index.
        device: Device that the step runs on.
        surroundings: What is known of the step beyond the graph.
        name: What the plan is called.
        part: How much of the step the graph is.

    Raises:
        BudgetError: no plan keeps the whole step inside the budget.
    """
    costs = price(graph, call_of, cost=surroundings.options.cost, device=device, may_run=surroundings.may_run)
    return plan_priced(graph, costs, device, surroundings, name=name, part=part)


def plan_priced(
    graph: TrainingGraph,
    costs: OpCosts,
    device: torch.device,
    surroundings: Surroundings,
    *,
    name: str,
    part: Part = Part.WHOLE,
    effort: int | None = None,
) -> Plan:
    """Plan a training graph whose costs are known, as `plan_graph` does; `effort` is that of `make_archive`."""
    archive = _archive_of(graph, costs, surroundings, effort)
    return _plan_among([archive], device, surroundings, name=name, part=part)[1]


def _archive_of(graph: TrainingGraph, costs: OpCosts, surroundings: Surroundings, effort: int | None = None) -> Archive:
    whole = dataclasses.replace(graph, optimizer_step_bytes=surroundings.optimizer.step_bytes)
    return make_archive(whole, costs, effort)


def _plan_among(
    archives: Sequence[Archive], device: torch.device, surroundings: Surroundings, *, name: str, part: Part
) -> tuple[int, Plan]:
    options, untouched = surroundings.options, archives[0]
    asked = options.memory_budget if options.memory_budget != "auto" else auto_budget_bytes(device)
    budget = budget_in_bytes(untouched, asked)
    if budget is not None and part == Part.MORE_FOLLOWS:
        fixed_bytes = untouched.search.graph.fixed_bytes
        budget -= max(budget - fixed_bytes, 0) // 2
    try:
        place, plan = make_plan_among(archives, budget, options.effective_max_slowdown, name=name)
    except BudgetError:
        if part == Part.WHOLE:
            raise
        place, plan = make_plan_among(archives, floor_bytes(archives), None, name=name)
        plan = with_note(plan, _OVER[part])
    total = total_bytes(device)
    if budget is not None and total is not None and budget > total:
        note = f"the budget {format_bytes(budget)} is more than the device has ({format_bytes(total)})"
        return place, with_note(plan, note)
    return place, plan


def with_budget_in_bytes(surroundings: Surroundings, device: torch.device) -> Surroundings:
    """Return the surroundings with a budget of ``"auto"`` looked up now: later, elsewhere, nobody could or should."""
    if surroundings.options.memory_budget != "auto":
        return surroundings
    options = dataclasses.replace(surroundings.options, memory_budget=auto_budget_bytes(device) or "auto")
    return dataclasses.replace(surroundings, options=options)


def with_note(plan: Plan, note: str) -> Plan:
    """Return the plan with one more note."""
    return dataclasses.replace(plan, notes=(*plan.notes, note))


def _call_of(capture: JointCapture, index: int) -> OpCall:
    node = capture.op_nodes[index]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    assert callable(node.target)
    return node.target, args, kwargs


def device_of(module: fx.GraphModule) -> torch.device:
    """Return the device of a graph: the first accelerator that a value lies on, else the CPU."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.device
    return torch.device("cpu")
