"""Plan a captured graph with what is known of the step around it."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import fx

from torchecho.capture.fx import JointCapture
from torchecho.devices import device_among
from torchecho.errors import EchoError
from torchecho.ir.graph import TrainingGraph
from torchecho.meter.capacity import auto_budget_bytes, total_bytes
from torchecho.meter.optimizer import BytesOfOptimizers
from torchecho.meter.pricing import OpCall, price
from torchecho.options import Options
from torchecho.planner.plan import Plan
from torchecho.planner.planner import make_archive
from torchecho.planner.request import Part, PlanRequest, answer, answer_among


@dataclass(frozen=True)
class Surroundings:
    """What the engine knows of the step beyond the graph.

    Attributes:
        options: What the user asked for.
        name: What plans are called; empty to call them after the first module of each graph.
        model_bytes: Bytes of all parameters and buffers of the model; 0 when only its graphs are known.
        optimizer: Bytes of the optimizer's state and step; zeros when it is not known.
        ahead: How the user can have a first step planned before it runs; empty where nobody can.
        may_run: Whether ops may be run to measure them; False on fake tensors.
        on_plan: Called with each plan's number in the journal.
        on_refusal: Called with each error that is raised in the program in place of a plan.
        while_planning: Is entered while the training waits for the plan of a name.
        waiting: Stash and input bytes of pieces of this step whose forward has run and whose backward has not.
    """

    options: Options
    name: str = ""
    model_bytes: int = 0
    optimizer: BytesOfOptimizers = field(default_factory=lambda: BytesOfOptimizers(list))
    ahead: str = ""
    may_run: bool = True
    on_plan: Callable[[int], None] | None = None
    on_refusal: Callable[[EchoError], None] | None = None
    while_planning: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext
    waiting: "weakref.WeakKeyDictionary[object, int]" = field(default_factory=weakref.WeakKeyDictionary)


def bytes_of_optimizer(options: Options) -> BytesOfOptimizers:
    """Return the bytes of the optimizer that the user named; zeros without one."""
    optimizer = options.optimizer
    found = BytesOfOptimizers(lambda: [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [])
    found.foresee()
    return found


CallOf = Callable[[int], OpCall]


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
    archives = []
    for graph, call_of in graphs:
        costs = price(graph, call_of, cost=surroundings.options.cost, device=device, may_run=surroundings.may_run)
        archives.append(make_archive(whole_step(graph, surroundings), costs))
    return answer_among(archives, request_of(surroundings, device, name=name, part=part))


def plan_graph(
    graph: TrainingGraph,
    call_of: CallOf,
    device: torch.device,
    surroundings: Surroundings,
    *,
    name: str,
    part: Part = Part.WHOLE,
) -> Plan:
    """Price and plan a training graph, as `torchecho.planner.request` does.

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
    return answer(whole_step(graph, surroundings), costs, request_of(surroundings, device, name=name, part=part))


def whole_step(graph: TrainingGraph, surroundings: Surroundings) -> TrainingGraph:
    """Return the graph with the optimizer's step at its end."""
    return dataclasses.replace(graph, optimizer_step_bytes=surroundings.optimizer.step_bytes)


def request_of(surroundings: Surroundings, device: torch.device, *, name: str, part: Part) -> PlanRequest:
    """Return what to ask of the planner."""
    options = surroundings.options
    budget = options.memory_budget
    asked = auto_budget_bytes(device) if isinstance(budget, str) else budget
    return PlanRequest(asked, options.effective_max_slowdown, name, part, total_bytes(device))


def with_budget_in_bytes(surroundings: Surroundings, device: torch.device) -> Surroundings:
    """Return the surroundings with a budget of ``"auto"`` looked up now: later, elsewhere, nobody could or should."""
    if surroundings.options.memory_budget != "auto":
        return surroundings
    options = dataclasses.replace(surroundings.options, memory_budget=auto_budget_bytes(device) or "auto")
    return dataclasses.replace(surroundings, options=options)


def _call_of(capture: JointCapture, index: int) -> OpCall:
    node = capture.op_nodes[index]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    assert callable(node.target)
    return node.target, args, kwargs


def device_of(module: fx.GraphModule) -> torch.device:
    """Return the device of a graph: the first accelerator that a value lies on, else the CPU."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    return device_among(value.device for value in values if isinstance(value, torch.Tensor))
