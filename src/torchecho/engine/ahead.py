"""Plan the largest batch before the first step: rehearse an example of it on fake tensors."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchecho.engine.eager import EagerEngine
from torchecho.engine.notice import warn
from torchecho.engine.rehearsal import rehearse
from torchecho.engine.situation import situation_of
from torchecho.errors import BudgetError, CaptureError, OptionError


@dataclass(frozen=True)
class Example:
    """What a model is called with in one training step."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors in it, in the order in which a door meets them."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]


def parse_example(model: nn.Module, largest: object) -> Example:
    """Return the example of a largest batch that a user gave.

    Args:
        model: Model that is called with it.
        largest: One tensor, positional arguments, or a mapping of keyword arguments.

    Raises:
        OptionError: it is none of these, holds no tensor, or does not fit the signature of the model's forward.
    """
    if isinstance(largest, torch.Tensor):
        example = Example((largest,), {})
    elif isinstance(largest, Mapping) and all(isinstance(name, str) for name in largest):
        example = Example((), dict(largest))
    elif isinstance(largest, (tuple, list)):
        example = Example(tuple(largest), {})
    else:
        raise OptionError(
            "largest must be an example of the largest batch: a tensor, a tuple of the model's positional arguments, or"
            f" a dict of its keyword arguments; got an object of type {type(largest).__name__}"
        )
    if not example.tensors:
        raise OptionError(
            "largest holds no tensor: give what one training step on the largest batch calls the model with"
        )
    _check_signature(model, example)
    return example


def plan_ahead(engine: EagerEngine, model: nn.Module, example: Example) -> None:
    """Make the plan of an example before any step; warn, and leave it to the steps that run, where that fails.

    Raises:
        BudgetError: no plan keeps the step inside the budget.
        CaptureError: with ``strict``, it cannot be rehearsed or planned.
    """
    situation = situation_of(example.tensors, has_gradients=False)
    try:
        engine.plan_ahead(situation, rehearse(model, example.args, example.kwargs, must_match=True))
    except (BudgetError, OptionError):
        raise
    except Exception as error:  # the model's own forward runs in here, on tensors that it was not written for
        reason = str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
        message = f"{type(model).__name__} has no plan for its largest batch before it runs: {reason}"
        if engine.surroundings.options.strict:
            raise CaptureError(f"{message} (leave out largest to plan from the steps that run)") from error
        warn(f"{message}; plans are made from the steps that run: let the largest batch come first")


def _check_signature(model: nn.Module, example: Example) -> None:
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward that is no Python function
        return
    try:
        signature.bind(*example.args, **example.kwargs)
    except TypeError as error:
        raise OptionError(
            f"largest does not fit {type(model).__name__}.forward{signature}: {error}; give what one training step on"
            " the largest batch calls the model with"
        ) from None
