"""Launches on the device of the tensors, which need not be the current one."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor


class _HasInput(Protocol):
    @property
    def x(self) -> Tensor:
        """Return the input of a layer."""


D = TypeVar("D", bound=_HasInput)
P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(function: Callable[Concatenate[D, P], R]) -> Callable[Concatenate[D, P], R]:
    """Make the device of a direction's input the current one while `function` runs; Triton launches on that."""

    @functools.wraps(function)
    def guarded(direction: D, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(direction.x):
            return function(direction, *args, **kwargs)

    return guarded
