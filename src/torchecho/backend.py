"""The compile engine: the backend behind ``torch.compile(model, backend="torchecho")``.

Dynamo hands over a graph, AOTAutograd makes the joint graph of it, and the partitioner in here plans and applies. A plan
is measured at the first real step, and whatever fails inside falls back to the untouched step with one warning.
"""

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import ShortenTraceback
from torch._functorch.partitioners import default_partition

from torchecho.apply.fx import apply_schedule
from torchecho.apply.lowering import lower_eager
from torchecho.capture.fx import JointCapture, capture_joint
from torchecho.errors import BudgetError, EchoError, EchoWarning, OptionError
from torchecho.meter.capacity import auto_budget_bytes, total_bytes
from torchecho.meter.pricing import OpCall, price
from torchecho.meter.probe import PeakProbe, probe_available
from torchecho.options import Options, parse_options
from torchecho.plan import journal
from torchecho.plan.plan import Plan
from torchecho.plan.planner import make_archive, make_plan
from torchecho.units import format_bytes

_logger = logging.getLogger("torchecho")

# Unrolling happens while AOTAutograd traces; with oneDNN on, an LSTM whose input needs no gradient would be traced as
# an inference-only op (torch._decomp.decompositions.select_one_layer_lstm_function).
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@dataclass(frozen=True)
class Surroundings:
    """What the engine knows of the step beyond the graph.

    Attributes:
        options: What the user asked for.
        model_bytes: Bytes of all parameters and buffers of the model; 0 when only its graphs are known.
        optimizer_bytes: Bytes of the optimizer's state; 0 when it is not known.
        may_run: Whether ops may be run to measure them; False on fake tensors.
        on_plan: Called with each plan's number in the journal.
    """

    options: Options
    model_bytes: int = 0
    optimizer_bytes: int = 0
    may_run: bool = True
    on_plan: Callable[[int], None] = lambda number: None


def torchecho_backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, object] | None = None, **extra: Any
) -> Callable[..., Any]:
    """Compile a Dynamo graph under a plan; this is what ``backend="torchecho"`` names.

    Args:
        module: Graph that Dynamo captured.
        example_inputs: Fake or real inputs of it.
        options: Options of torchecho, as in ``torch.compile(model, backend="torchecho", options={...})``.
        extra: Other keyword arguments of ``torch.compile``; a ``mode`` has no meaning here.

    Raises:
        OptionError: an option is unknown or its value cannot be used.
        BudgetError: no plan keeps the step inside the budget.
    """
    try:
        if extra.get("mode") not in (None, "default"):
            raise OptionError(f"mode={extra['mode']!r} is Inductor's: with torchecho use options={{...}} instead")
        return compile_piece(module, example_inputs, Surroundings(parse_options(options or {})))
    except EchoError as error:
        raise through_dynamo(error) from error


def through_dynamo(error: EchoError) -> EchoError:
    """Return the error as one that Dynamo hands on unchanged instead of wrapping it."""
    kind = type(error)
    if isinstance(error, ShortenTraceback):
        return error
    passing = type(kind.__name__, (kind, ShortenTraceback), {"__module__": kind.__module__})
    made = passing(str(error))
    made.first_useful_frame = None
    assert isinstance(made, EchoError)
    return made


def without_dynamo(error: EchoError) -> EchoError:
    """Return an error that came through Dynamo as its plain class, free of Dynamo's advice and frames."""
    if not isinstance(error, ShortenTraceback):
        return error
    plain = type(error).__bases__[0]
    made = plain(str(error).split("\n\nSet TORCHDYNAMO_VERBOSE", maxsplit=1)[0])
    assert isinstance(made, EchoError)
    return made


def compile_piece(
    module: fx.GraphModule, example_inputs: Sequence[Any], surroundings: Surroundings
) -> Callable[..., Any]:
    """Compile one graph: trace the joint graph, plan it, and lower both halves.

    Raises:
        EchoError: an option or the budget cannot be met, or with ``strict`` anything failed inside.
    """
    piece = _Piece(surroundings, _name_of(module))
    compiler = aot_autograd(
        fw_compiler=piece.lower_forward,
        bw_compiler=piece.lower_backward,
        inference_compiler=lower_eager,
        partition_fn=piece.partition,
        keep_inference_input_mutations=True,
    )
    with _tracing(module):
        compiled: Callable[..., Any] = compiler(module, example_inputs)
    return compiled


def _name_of(module: fx.GraphModule) -> str:
    for node in module.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            return str(next(iter(stack.values()))[1]).rsplit(".", 1)[-1].rstrip("'>")
    return "step"


@contextlib.contextmanager
def _tracing(module: fx.GraphModule) -> Iterator[None]:
    recurrent = any(getattr(n.target, "__name__", "") in _RECURRENT for n in module.graph.nodes)
    enabled = torch._C._get_mkldnn_enabled()
    if recurrent:
        torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@dataclass
class _Piece:
    """One compiled graph: its plan, and the probe that measures its first real step."""

    surroundings: Surroundings
    name: str
    number: int | None = None
    fixed_bytes: int = 0
    probe: PeakProbe | None = None
    is_measured: bool = field(default=False)

    def partition(
        self,
        module: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **extra: Any,
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
            _warn(f"{self.name} runs untouched: planning it failed with {type(error).__name__}: {error}")
            return self._untouched(module, joint_inputs, num_fwd_outputs, static_lifetime_input_indices)

    def _untouched(
        self, module: fx.GraphModule, joint_inputs: Any, num_fwd_outputs: int, static: list[int] | None
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return default_partition(  # type: ignore[no-any-return]  # untyped in torch
            module, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static
        )

    def _planned(
        self, module: fx.GraphModule, num_fwd_outputs: int, static: list[int] | None
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        capture = capture_joint(
            module,
            num_forward_outputs=num_fwd_outputs,
            static_indices=static,
            base_bytes=self.surroundings.optimizer_bytes,
            model_bytes=self.surroundings.model_bytes,
        )
        plan = plan_capture(capture, self.surroundings, name=self.name)
        halves = apply_schedule(capture, plan.schedule)
        self.number = journal.record(plan)
        self.fixed_bytes = capture.graph.fixed_bytes
        self.surroundings.on_plan(self.number)
        _logger.info("%s: peak %s predicted", plan.name, format_bytes(plan.predicted_peak_bytes))
        return halves

    def lower_forward(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Lower the forward half; its first real run starts the probe."""
        run = lower_eager(module, example_inputs)
        device = device_of(module)

        def forward(inputs: list[Any]) -> Any:
            if not self.is_measured and self.number is not None:
                self._start_probe(device)
            return run(inputs)

        forward._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd recognises the convention
        return forward

    def lower_backward(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Lower the backward half; its first real run ends the measurement."""
        run = lower_eager(module, example_inputs)

        def backward(inputs: list[Any]) -> Any:
            gradients = run(inputs)
            if self.probe is not None:
                self._stop_probe()
            return gradients

        backward._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd recognises the convention
        return backward

    def _start_probe(self, device: torch.device) -> None:
        if not self.surroundings.may_run or not probe_available(device):
            self.is_measured = True
            return
        self.probe = PeakProbe(device)
        self.probe.start()

    def _stop_probe(self) -> None:
        assert self.probe is not None and self.number is not None, "a probe runs only under a plan"
        peak = self.fixed_bytes + self.probe.stop()
        self.probe, self.is_measured = None, True
        plan = journal.amend(self.number, measured_peak_bytes=peak)
        if plan.budget_bytes is not None and peak > plan.budget_bytes:
            _warn(
                f"{plan.name}: measured peak {format_bytes(peak)} is over the budget {format_bytes(plan.budget_bytes)}"
                f" ({format_bytes(plan.predicted_peak_bytes)} was predicted): lower the budget by the difference"
            )


def _warn(message: str) -> None:
    warnings.warn(f"torchecho: {message}", EchoWarning, stacklevel=3)


def plan_capture(capture: JointCapture, surroundings: Surroundings, *, name: str) -> Plan:
    """Price and plan a captured joint graph.

    Raises:
        BudgetError: no plan keeps the step inside the budget.
    """
    options = surroundings.options
    costs = price(
        capture.graph,
        lambda index: _call_of(capture, index),
        cost=options.cost,
        device=device_of(capture.module),
        may_run=surroundings.may_run,
    )
    archive = make_archive(capture.graph, costs)
    device = device_of(capture.module)
    budget = options.memory_budget if options.memory_budget != "auto" else auto_budget_bytes(device)
    plan = make_plan(archive, budget, options.effective_max_slowdown, name=name)
    total = total_bytes(device)
    if plan.budget_bytes is not None and total is not None and plan.budget_bytes > total:
        note = f"the budget {format_bytes(plan.budget_bytes)} is more than the device has ({format_bytes(total)})"
        return dataclasses.replace(plan, notes=(*plan.notes, note))
    return plan


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


def __getattr__(name: str) -> Any:
    """Return the backend under its entry-point name, and let Dynamo trace recurrent modules from then on.

    ``torch.compile`` gives a backend that is named by a string no other moment before it traces.
    """
    if name != "torchecho":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch._dynamo

    torch._dynamo.config.allow_rnn = True
    return torchecho_backend
