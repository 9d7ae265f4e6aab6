"""The calls that a user makes: `optimize`, `disable`, `plan`, `plans`, `measure`."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from torchecho.backend import compile_piece
from torchecho.engine.dynamo import through_dynamo, without_dynamo
from torchecho.engine.planning import Surroundings
from torchecho.errors import EchoError, OptionError
from torchecho.meter.optimizer import optimizer_state_bytes
from torchecho.meter.step import Measurement, measure
from torchecho.options import Options, parse_options
from torchecho.planner import journal
from torchecho.planner.journal import plans
from torchecho.planner.plan import Plan

__all__ = ["Measurement", "disable", "measure", "optimize", "plan", "plans"]

Model = TypeVar("Model", bound=nn.Module)


def optimize(model: Model, *, dynamic: bool | None = None, **options: Any) -> Model:
    """Make a model train inside a memory budget; in place.

    Class, parameters, ``state_dict``, hooks, deep copies and pickles stay what they were; only how the step runs changes.

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
    if chosen.engine == "eager":
        raise OptionError("engine='eager' is not built yet: leave engine at 'auto' or choose 'compile'")
    surroundings = Surroundings(chosen, model_bytes=_bytes_of(model), optimizer_bytes=_optimizer_bytes(chosen))
    model._compiled_call_impl = _compiled(model, surroundings, dynamic)
    return model


def disable(model: Model) -> Model:
    """Take a model back to what it was before `optimize`; returns the same object."""
    model._compiled_call_impl = None
    return model


def plan(
    model: nn.Module, example_args: Sequence[Any] = (), example_kwargs: Mapping[str, Any] | None = None, **options: Any
) -> Plan:
    """Plan a training step of a model without running it.

    Everything happens on fake tensors: no memory is allocated for the model's values and no accelerator is needed. A model
    that is captured in several pieces gives the plan of the piece with the highest peak, with a note.

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
    surroundings = Surroundings(
        chosen,
        model_bytes=_bytes_of(model),
        optimizer_bytes=_optimizer_bytes(chosen),
        may_run=False,
        on_plan=numbers.append,
    )
    args = (example_args,) if isinstance(example_args, torch.Tensor) else tuple(example_args)
    mode = FakeTensorMode()
    twin = copy.deepcopy(model, {id(t): _fake(mode, t) for t in _tensors(model)})
    fake_args, fake_kwargs = tree_map_only(torch.Tensor, functools.partial(_fake, mode), (args, dict(example_kwargs or {})))
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


def _compiled(model: nn.Module, surroundings: Surroundings, dynamic: bool | None) -> Callable[..., Any]:  # noqa: FBT001 - torch.compile's own argument
    compiled = torch.compile(model._call_impl, backend=_backend(surroundings), dynamic=dynamic)

    def call(*args: Any, **kwargs: Any) -> Any:
        surroundings.waiting.clear()
        try:
            with torch._dynamo.config.patch(allow_rnn=True):
                return compiled(*args, **kwargs)
        except EchoError as error:
            raise without_dynamo(error) from None

    return call


def _backend(surroundings: Surroundings) -> Callable[..., Any]:
    def torchecho(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return compile_piece(module, example_inputs, surroundings)
        except EchoError as error:
            raise through_dynamo(error) from error

    return torchecho


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _bytes_of(model: nn.Module) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(model)}
    return sum(storages.values())


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    fake = mode.from_tensor(tensor)
    return nn.Parameter(fake.detach(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _optimizer_bytes(options: Options) -> int:
    optimizer = options.optimizer
    return optimizer_state_bytes(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else 0
