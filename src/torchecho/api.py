"""The calls that a user makes: `optimize`, `disable`, `plan`, `plans`, `measure`."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import trace_rules  # private: tells which files Dynamo skips
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from torchecho.backend import compile_piece
from torchecho.engine.door import Block, block, eager_call
from torchecho.engine.dynamo import through_dynamo, without_dynamo
from torchecho.engine.modules import model_bytes
from torchecho.engine.planning import Surroundings, bytes_of_optimizer
from torchecho.errors import EchoError, OptionError
from torchecho.meter.step import Measurement, measure
from torchecho.options import Options, parse_options
from torchecho.planner.journal import plans
from torchecho.planner.plan import Plan

__all__ = ["Measurement", "budget", "disable", "measure", "optimize", "plan", "plans"]

Model = TypeVar("Model", bound=nn.Module)

# Beyond Dynamo's own limit of 8 a function runs untouched without a word: models of one class share it, and so do all
# lengths that a loop over time is unrolled for.
_COMPILES_OF_A_FUNCTION = 256
_COMPILES = 4096


def optimize(model: Model, *, dynamic: bool | None = None, **options: Any) -> Model:
    """Make a model train inside a memory budget; in place.

    Class, parameters, ``state_dict``, hooks, deep copies and pickles stay what they were; only how the step runs
    changes.

    Args:
        model: Model to optimize; the same object is returned.
        dynamic: As in ``torch.compile``: whether sizes that change are compiled as symbols.
        options: ``memory_budget``, ``max_slowdown``, ``engine``, ``lowering``, ``cost``, ``strict``, ``optimizer``.

    Raises:
        OptionError: the model is not a module, or an option is unknown or cannot be used.

    Example:
        >>> torchecho.optimize(model, memory_budget="2GiB", optimizer=optimizer)  # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"optimize takes a torch.nn.Module, found {type(model).__name__}")
    chosen = parse_options(options)
    surroundings = _surroundings(model, chosen)
    runs = eager_call(model, surroundings) if chosen.engine == "eager" else _compiled(model, surroundings, dynamic)
    model._compiled_call_impl = runs  # noqa: SLF001 - what Module.compile() sets
    return model


def budget(memory_budget: float | str, **options: Any) -> Block:
    """Return a context manager: the block, and its backward, keep to a memory budget.

    For code without a module. The backward may stand inside the block or after it. Each place in a program where a
    block begins has its own plan, made from the first run of the block.

    Args:
        memory_budget: As in `optimize`.
        options: Other options of `optimize`.

    Raises:
        OptionError: an option is unknown or cannot be used.

    Example:
        >>> with torchecho.budget("2GiB"):  # doctest: +SKIP
        ...     loss = step(batch)
        >>> loss.backward()  # doctest: +SKIP
    """
    chosen = parse_options({"memory_budget": memory_budget, "engine": "eager", **options})
    return block(chosen, lambda: Surroundings(chosen, name="block", optimizer=bytes_of_optimizer(chosen)))


def disable(model: Model) -> Model:
    """Take a model back to what it was before `optimize`; returns the same object."""
    model._compiled_call_impl = None  # noqa: SLF001 - what Module.compile() sets
    return model


def plan(
    model: nn.Module,
    example_args: torch.Tensor | Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """Plan a training step of a model without running it.

    Everything happens on fake tensors: no memory is allocated for the model's values and no accelerator is needed. A
    model that is captured in several pieces gives the plan of the piece with the highest peak, with a note.

    Args:
        model: Model whose forward is planned; tensors may be on any device.
        example_args: Positional arguments of one training batch (or one tensor).
        example_kwargs: Keyword arguments of it.
        options: As in `optimize`.

    Raises:
        OptionError: an option is unknown or cannot be used.
        BudgetError: no plan keeps the step inside the budget.
    """
    chosen = parse_options(options)
    numbers: list[int] = []
    surroundings = dataclasses.replace(_surroundings(model, chosen), may_run=False, on_plan=numbers.append)
    args = (example_args,) if isinstance(example_args, torch.Tensor) else tuple(example_args)
    mode = FakeTensorMode()
    twin = copy.deepcopy(model, {id(t): _fake(mode, t) for t in _tensors(model)})
    fake_args, fake_kwargs = tree_map_only(
        torch.Tensor, functools.partial(_fake, mode), (args, dict(example_kwargs or {}))
    )
    with mode, torch.enable_grad():
        _compiled(twin, surroundings, dynamic=False)(*fake_args, **fake_kwargs)
    made = [plans()[number] for number in numbers]
    if not made:
        raise EchoError("nothing was planned: the model makes no gradient for any parameter in this call")
    largest = max(made, key=lambda one: one.predicted_peak_bytes)
    if len(made) == 1:
        return largest
    note = f"the model is captured in {len(made)} pieces; this is the one with the highest peak"
    return dataclasses.replace(largest, notes=(*largest.notes, note))


def _surroundings(model: nn.Module, options: Options) -> Surroundings:
    return Surroundings(
        options,
        name=type(model).__name__,
        model_bytes=model_bytes(model),
        optimizer=bytes_of_optimizer(options),
    )


def _compiled(model: nn.Module, surroundings: Surroundings, dynamic: bool | None) -> Callable[..., Any]:  # noqa: FBT001 - torch.compile's own argument
    compiled = torch.compile(_traceable(model), backend=_backend(surroundings), dynamic=dynamic)

    def call(*args: Any, **kwargs: Any) -> Any:
        surroundings.waiting.clear()
        try:
            with dynamo_config.patch(_dynamo_settings(surroundings.options)):
                return compiled(*args, **kwargs)
        except EchoError as error:
            raise without_dynamo(error) from None

    return call


def _traceable(self: nn.Module) -> Callable[..., Any]:
    """Return what runs a module's forward with its hooks, and can be traced.

    Dynamo skips the frames of torch's own files, so that the forward of an ``nn.Sequential`` needs a frame around it.
    The module is called `self` here because the paths of modules begin with the name by which the frame knows them.
    """
    if not trace_rules.check(self.forward):
        return self._call_impl  # what Module.compile() compiles

    def forward(*args: Any, **kwargs: Any) -> Any:
        return self._call_impl(*args, **kwargs)

    return forward


def _dynamo_settings(options: Options) -> dict[str, object]:
    return {
        "allow_rnn": True,
        "recompile_limit": max(dynamo_config.recompile_limit, _COMPILES_OF_A_FUNCTION),
        "accumulated_recompile_limit": max(dynamo_config.accumulated_recompile_limit, _COMPILES),
        "fail_on_recompile_limit_hit": options.strict or dynamo_config.fail_on_recompile_limit_hit,
    }


def _backend(surroundings: Surroundings) -> Callable[..., Any]:
    def torchecho(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return compile_piece(module, example_inputs, surroundings)
        except EchoError as error:
            raise through_dynamo(error) from error

    return torchecho


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    fake = mode.from_tensor(tensor)
    return nn.Parameter(fake.detach(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
