"""One compiled graph: split by a plan, lowered, and measured at its first real step."""

import dataclasses
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import default_partition

from torchecho.apply.fx import apply_schedule
from torchecho.apply.lowering import lower_eager
from torchecho.capture.fx import JointCapture, capture_joint
from torchecho.capture.stash_modes import Modes, alternatives, open_layers, set_modes, smallest
from torchecho.engine import overrun
from torchecho.engine.dynamo import through_dynamo
from torchecho.engine.notice import warn
from torchecho.engine.planning import Surroundings, device_of, graph_and_calls, plan_alternatives
from torchecho.errors import BudgetError, EchoError, OptionError
from torchecho.meter.probe import PeakProbe, probe_available
from torchecho.planner import journal
from torchecho.planner.plan import Plan
from torchecho.planner.request import Part, with_note
from torchecho.units import format_bytes

_logger = logging.getLogger("torchecho")


def with_modes_note(plan: Plan, modes: Modes) -> Plan:
    """Return the plan with a note on the recurrent layers that stash the least; as it is if there are none."""
    few = smallest(modes)
    if not few:
        return plan
    return with_note(plan, f'{few} of {len(modes)} recurrent layers rebuild their gates in the backward (stash="lean")')


@dataclass(eq=False)
class Piece:
    """One compiled graph: its plan, and the probe that measures its first real step."""

    surroundings: Surroundings
    name: str
    more_follows: bool
    number: int | None = None
    fixed_bytes: int = 0
    waiting_bytes: int = 0
    probe: PeakProbe | None = None
    is_measured: bool = field(default=False)

    def partition(
        self,
        module: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **extra: Any,  # noqa: ARG002 - what newer releases of torch hand over besides
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph by a plan; nested regions, and what torchecho fails on, by PyTorch's default."""
        if not joint_inputs:
            return self._untouched(module, joint_inputs, num_fwd_outputs, static_lifetime_input_indices)
        try:
            return self._planned(module, num_fwd_outputs, static_lifetime_input_indices)
        except (BudgetError, OptionError) as error:
            raise through_dynamo(error) from error
        except Exception as error:  # whatever fails in here must not break the training
            if self.surroundings.options.strict:
                raise through_dynamo(EchoError(f"planning {self.name} failed: {error}")) from error
            warn(f"{self.name} runs untouched: planning it failed with {type(error).__name__}: {error}")
            return self._untouched(module, joint_inputs, num_fwd_outputs, static_lifetime_input_indices)

    @property
    def part(self) -> Part:
        """How much of the step the graph is, as far as is known when it is compiled."""
        if self.more_follows:
            return Part.MORE_FOLLOWS
        return Part.LAST if self.surroundings.waiting else Part.WHOLE

    @property
    def base_bytes(self) -> int:
        """Bytes alive throughout that neither the graph nor the model holds."""
        return self.surroundings.optimizer.state_bytes + sum(self.surroundings.waiting.values())

    def _untouched(
        self, module: fx.GraphModule, joint_inputs: Any, num_fwd_outputs: int, static: list[int] | None
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return default_partition(
            module, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static
        )

    def _planned(
        self, module: fx.GraphModule, num_fwd_outputs: int, static: list[int] | None
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        layers = open_layers(module.graph)
        choices = alternatives(len(layers))

        def captured(modes: Modes) -> JointCapture:
            set_modes(module.graph, layers, modes)
            return capture_joint(
                module,
                num_forward_outputs=num_fwd_outputs,
                static_indices=static,
                base_bytes=self.base_bytes,
                model_bytes=self.surroundings.model_bytes,
                in_place=True,
            )

        graphs = (graph_and_calls(captured(modes)) for modes in choices)
        place, plan = plan_alternatives(graphs, device_of(module), self.surroundings, name=self.name, part=self.part)
        capture = captured(choices[place])
        halves = apply_schedule(capture, plan.schedule)
        self.take(
            dataclasses.replace(with_modes_note(plan, choices[place]), lowering="eager"), capture.graph.fixed_bytes
        )
        return halves

    def take(self, plan: Plan, fixed_bytes: int) -> None:
        """Stand under a plan from now on, and tell whoever listens."""
        self.number = journal.record(plan)
        self.fixed_bytes = fixed_bytes
        # Until its backward has run, a piece keeps its inputs alive too: where the graph broke they are feature maps.
        inputs_bytes = max(fixed_bytes - self.base_bytes - self.surroundings.model_bytes, 0)
        self.waiting_bytes = plan.stash_bytes + inputs_bytes
        if self.surroundings.on_plan is not None:
            self.surroundings.on_plan(self.number)
        _logger.info("%s: peak %s predicted", plan.name, format_bytes(plan.predicted_peak_bytes))

    def lower_forward(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Lower the forward half."""
        return self.watched_forward(lower_eager(module, example_inputs), device_of(module))

    def watched_forward(self, run: Callable[[list[Any]], Any], device: torch.device) -> Callable[[list[Any]], Any]:
        """Return what runs a forward half; its first real run starts the probe."""

        def forward(inputs: list[Any]) -> Any:
            if self.number is not None:
                self.surroundings.waiting[self] = self.waiting_bytes
                if not self.is_measured:
                    self._start_probe(device)
            return run(inputs)

        forward._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001 - how AOTAutograd tells the convention
        return forward

    def lower_backward(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Lower the backward half."""
        return self.watched_backward(lower_eager(module, example_inputs))

    def watched_backward(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return what runs a backward half; its first real run ends the measurement."""

        def backward(inputs: list[Any]) -> Any:
            gradients = run(inputs)
            self.surroundings.waiting.pop(self, None)
            if self.probe is not None:
                self._stop_probe()
            return gradients

        backward._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001 - how AOTAutograd tells the convention
        return backward

    def _start_probe(self, device: torch.device) -> None:
        if not self.surroundings.may_run or not probe_available(device):
            self.is_measured = True
            return
        gc.collect()  # cyclic garbage of earlier steps that died during this one would count as freed by it
        self.probe = PeakProbe(device)
        self.probe.start()

    def _stop_probe(self) -> None:
        assert self.probe is not None
        assert self.number is not None, "a probe runs only under a plan"
        peak = self.fixed_bytes + self.probe.stop()
        self.probe, self.is_measured = None, True
        plan = journal.amend(self.number, measured_peak_bytes=peak)
        overrun.tell_of_step(plan, peak, "work outside the plan took the rest; lower the budget by as much")
