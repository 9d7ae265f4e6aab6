"""The eager engine: plan a step that was recorded as it ran, and run the next ones under the plan."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from torchecho.apply.policy import KEEP, WRITE, Policy
from torchecho.capture.tape import Recording
from torchecho.capture.tape_graph import TapeCapture, build_graph
from torchecho.engine.planning import Surroundings, plan_graph
from torchecho.engine.piece import warn
from torchecho.errors import BudgetError, EchoError, OptionError
from torchecho.planner import journal
from torchecho.planner.plan import Plan
from torchecho.units import format_bytes

_logger = logging.getLogger("torchecho")


@dataclass(frozen=True, slots=True)
class Situation:
    """What a step starts from; steps that start from the same are taken for alike.

    Attributes:
        sizes: Shape and dtype of each tensor that the program is given.
        has_gradients: Gradients of an earlier backward are there, so that this one adds to them.
    """

    sizes: tuple[tuple[tuple[int, ...], str], ...]
    has_gradients: bool


@dataclass(frozen=True)
class Planned:
    """A plan for steps of one situation, and its policy; `number` is its place in the journal."""

    policy: Policy
    number: int
    fixed_bytes: int


@dataclass(eq=False)
class EagerEngine:
    """The plans of one program."""

    surroundings: Surroundings
    model: nn.Module | None = None
    plans: dict[Situation, Planned | None] = field(default_factory=dict)

    def situation(self, tensors: Iterable[torch.Tensor]) -> Situation:
        """Return what a step on some tensors starts from."""
        sizes = tuple((tuple(t.shape), str(t.dtype)) for t in tensors)
        return Situation(sizes, any(True for _ in self.gradients()))

    def gradients(self) -> Iterable[torch.Tensor]:
        """Yield the gradients that are there."""
        for parameter in self.model.parameters() if self.model is not None else ():
            if parameter.grad is not None:
                yield parameter.grad

    def learn(self, situation: Situation, recording: Recording) -> None:
        """Plan steps of a situation by a recorded one.

        Raises:
            BudgetError: no plan keeps the step inside the budget.
            EchoError: with ``strict``, anything failed.
        """
        self.plans[situation] = None
        try:
            self.plans[situation] = self._plan(recording)
        except (BudgetError, OptionError):
            raise
        except Exception as error:  # whatever fails in here must not break the training
            if self.surroundings.options.strict:
                raise EchoError(f"planning {self.surroundings.name} failed: {error}") from error
            warn(
                f"{self.surroundings.name} runs untouched: planning it failed with {type(error).__name__}: {error}"
            )

    def measured(self, planned: Planned, peak_above_start_bytes: int) -> None:
        """Note the peak of a planned step, and warn when it is over the budget."""
        peak = planned.fixed_bytes + peak_above_start_bytes
        plan = journal.amend(planned.number, measured_peak_bytes=peak)
        if plan.budget_bytes is not None and peak > plan.budget_bytes:
            warn(
                f"{plan.name}: measured peak {format_bytes(peak)} is over the budget {format_bytes(plan.budget_bytes)}"
                f" ({format_bytes(plan.predicted_peak_bytes)} was predicted): lower the budget by as much"
            )

    def _plan(self, recording: Recording) -> Planned:
        surroundings = self.surroundings
        capture = build_graph(
            recording,
            base_bytes=surroundings.optimizer.state_bytes,
            model_bytes=surroundings.model_bytes,
        )
        plan = plan_graph(
            capture.graph, capture.call, _device_of(recording), surroundings, name=surroundings.name or "step"
        )
        number = journal.record(plan)
        if surroundings.on_plan is not None:
            surroundings.on_plan(number)
        _logger.info("%s: peak %s predicted", plan.name, format_bytes(plan.predicted_peak_bytes))
        return Planned(policy_of(plan, capture), number, capture.graph.fixed_bytes)


def policy_of(plan: Plan, capture: TapeCapture) -> Policy:
    """Return what a plan decides for each call of the forward."""
    calls = capture.recording.calls[: capture.recording.backward_starts]
    windows = {capture.call_of_op[op]: window for op, window in plan.reuse_windows}
    decisions = (windows.get(i, WRITE if call.func._schema.is_mutable else KEEP) for i, call in enumerate(calls))  # noqa: SLF001 - no public way
    places = (call.place for call in calls)
    return Policy(
        tuple(call.func for call in calls), tuple(decisions), tuple(place for place in places if place is not None)
    )


def _device_of(recording: Recording) -> torch.device:
    """Return the device of a step: the first accelerator that it used, else the CPU."""
    devices = (record.device for record in recording.storages)
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))
