"""The calls that a user makes: `optimize`, `budget`, `disable`, `plan`, `plans`, `measure`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from torchecho.compiled import compiled_call
from torchecho.engine.ahead import parse_example
from torchecho.engine.door import Block, block, eager_call
from torchecho.engine.eager import EagerEngine
from torchecho.engine.installed import install, is_compiled_by_user, uninstall
from torchecho.engine.modules import model_bytes
from torchecho.engine.planning import Surroundings, bytes_of_optimizer
from torchecho.engine.rehearsal import fake_copy, rehearse, without_values
from torchecho.errors import EchoError, OptionError
from torchecho.meter.step import Measurement, measure
from torchecho.modules import checked_module
from torchecho.options import Options, check_for_eager, parse_dynamic, parse_options
from torchecho.planner.journal import plans
from torchecho.planner.plan import Plan

__all__ = ["Measurement", "budget", "disable", "measure", "optimize", "plan", "plans"]

Model = TypeVar("Model", bound=nn.Module)


def optimize(model: Model, *, largest: object | None = None, dynamic: bool | None = None, **options: Any) -> Model:
    """Make a model train inside a memory budget; in place.

    Class, parameters, ``state_dict``, hooks, deep copies and pickles stay what they were; only how the step runs
    changes.

    Args:
        model: Model to optimize; the same object is returned.
        largest: An example of the largest batch, for the eager engine: a tensor, a tuple of the positional arguments of
            the model, or a dict of its keyword arguments. It is rehearsed on fake tensors and planned at once, so that
            every batch that is nowhere larger meets a plan; give it when the model is on its device and in the mode in
            which it trains. Only the sizes of its tensors matter, not what is in them.
        dynamic: As in ``torch.compile``: whether sizes that change are compiled as symbols.
        options: ``memory_budget``, ``max_slowdown``, ``engine``, ``lowering``, ``cost``, ``strict``, ``optimizer``.

    Raises:
        OptionError: the model is not a module, or an option is unknown or cannot be used.
        BudgetError: no plan keeps the largest batch inside the budget.
        CaptureError: with ``strict``, the largest batch cannot be rehearsed.

    Example:
        >>> torchecho.optimize(model, memory_budget="2GiB", optimizer=optimizer)  # doctest: +SKIP
    """
    checked_module(model, "optimize")
    chosen, dynamic = parse_options(options), parse_dynamic(dynamic)
    surroundings = _surroundings(model, chosen)
    if _engine_of(model, chosen, dynamic) == "eager":
        runs = eager_call(model, surroundings, None if largest is None else parse_example(model, largest))
    elif largest is not None:
        raise OptionError(
            "largest is of the eager engine; the compile engine plans each size when it is compiled: leave it out"
        )
    else:
        runs = compiled_call(model, surroundings, dynamic)
    install(model, runs)
    return model


def _engine_of(model: nn.Module, options: Options, dynamic: bool | None) -> Literal["eager", "compile"]:  # noqa: FBT001 - torch.compile's own argument
    """Return the engine that the options mean: by default compile where the user does, or asks for what only it has."""
    if options.engine != "auto":
        if options.engine == "eager":
            check_for_eager(options, dynamic)
        return options.engine
    return "compile" if is_compiled_by_user(model) or options.lowering != "auto" or dynamic is not None else "eager"


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
    if chosen.engine == "compile":
        raise OptionError(
            "budget runs a block of code under the eager engine, found engine='compile':"
            " leave it out, or give a module to torchecho.optimize(model, engine='compile')"
        )
    check_for_eager(chosen)
    return block(chosen, lambda: Surroundings(chosen, name="block", optimizer=bytes_of_optimizer(chosen)))


def disable(model: Model) -> Model:
    """Take a model back to what it was before `optimize`; returns the same object.

    A model that was compiled by ``model.compile()`` then is compiled so again.

    Raises:
        OptionError: the model is not a module.
    """
    uninstall(checked_module(model, "disable"))
    return model


def plan(
    model: nn.Module,
    example_args: torch.Tensor | Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """Plan a training step of a model without running it.

    Everything happens on fake tensors: no memory is allocated for the model's values and no accelerator is needed. A
    loss outside the model is not known; oneDNN's recurrent layers have no fake form and are planned as the time steps
    that they stand for. A model that the compile engine captures in several pieces gives the plan of the piece with the
    highest peak, with a note.

    Args:
        model: Model whose forward is planned; tensors may be on any device.
        example_args: Positional arguments of one training batch (or one tensor).
        example_kwargs: Keyword arguments of it.
        options: As in `optimize`.

    Raises:
        OptionError: the model is not a module, an example is no arguments, or an option is unknown or cannot be used.
        BudgetError: no plan keeps the step inside the budget.
        CaptureError: the forward cannot run on fake tensors, because it looks at values.
    """
    checked_module(model, "plan")
    chosen = parse_options(options)
    numbers: list[int] = []
    surroundings = dataclasses.replace(_surroundings(model, chosen), may_run=False, on_plan=numbers.append)
    args, kwargs = _parse_call(example_args, example_kwargs)
    if _engine_of(model, chosen, None) == "eager":
        return EagerEngine(surroundings, model).plan_rehearsal(rehearse(model, args, kwargs))
    mode = FakeTensorMode()
    twin, fake_args, fake_kwargs = fake_copy(mode, model, args, kwargs)
    with without_values(model), mode, torch.enable_grad():
        compiled_call(twin, surroundings, dynamic=False)(*fake_args, **fake_kwargs)
    made = [plans()[number] for number in numbers]
    if not made:
        raise EchoError("nothing was planned: the model makes no gradient for any parameter in this call")
    largest = max(made, key=lambda one: one.predicted_peak_bytes)
    if len(made) == 1:
        return largest
    note = f"the model is captured in {len(made)} pieces; this is the one with the highest peak"
    return dataclasses.replace(largest, notes=(*largest.notes, note))


def _parse_call(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, (tuple, list)):
        raise OptionError(
            "plan: example_args must be a tensor or a tuple of the model's positional arguments;"
            f" got an object of type {type(args).__name__}"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise OptionError(
            "plan: example_kwargs must be a dict of the model's keyword arguments;"
            f" got an object of type {type(kwargs).__name__}"
        )
    return tuple(args), dict(kwargs or {})


def _surroundings(model: nn.Module, options: Options) -> Surroundings:
    return Surroundings(
        options,
        name=type(model).__name__,
        model_bytes=model_bytes(model),
        optimizer=bytes_of_optimizer(options),
        ahead="plan this step before it runs, by optimize(..., largest=example)",
    )
