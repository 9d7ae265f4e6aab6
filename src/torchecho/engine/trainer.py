"""Know what a running program trains with: which optimizers it makes, and how often it steps."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchecho.meter.optimizer import BytesOfOptimizers


class Trainer:
    """What a program trains with, as far as it has been seen.

    Attributes:
        num_optimizer_steps: Steps of optimizers that were made while `watched`.
        num_backwards: Backwards, those inside of others not counted.
    """

    def __init__(self) -> None:
        self.num_optimizer_steps = 0
        self.num_backwards = 0
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._backwards_running = 0

    @property
    def num_steps(self) -> int:
        """Training steps: those of the optimizers, or the backwards where the program updates parameters by itself."""
        return self.num_optimizer_steps or self.num_backwards

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that are alive, oldest first."""
        return [one for one in (reference() for reference in self._optimizers) if one is not None]

    def bytes_of(self, model: nn.Module) -> BytesOfOptimizers:
        """Return the bytes of the optimizers of what a step of a model trains, those made later included."""
        reference = weakref.ref(model)

        def optimizers() -> list[torch.optim.Optimizer]:
            trained = reference()
            return [] if trained is None else self.optimizers_of(trained)

        return BytesOfOptimizers(optimizers)

    def optimizers_of(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Return the optimizers of what a step of a model trains.

        They hold a parameter of the model, or one that a backward has reached: a decoder may follow an encoder.
        """
        of_model = {id(parameter) for parameter in model.parameters()}
        return [
            one
            for one in self.optimizers
            if any(id(p) in of_model or p.grad is not None for group in one.param_groups for p in group["params"])
        ]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what is made and called inside."""
        optimizer_init = torch.optim.Optimizer.__init__
        backward = torch.autograd.backward
        handle = register_optimizer_step_post_hook(self._stepped)
        torch.optim.Optimizer.__init__ = self._noting(optimizer_init)  # type: ignore[method-assign]
        torch.autograd.backward = self._counting(backward)
        try:
            yield
        finally:
            torch.autograd.backward = backward
            torch.optim.Optimizer.__init__ = optimizer_init  # type: ignore[method-assign]
            handle.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # The meter steps copies, which were never made by a call.
        self.num_optimizer_steps += any(one is optimizer for one in self.optimizers)

    def _noting(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def noted(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._optimizers.append(weakref.ref(optimizer))

        return noted

    def _counting(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def counted(*args: Any, **kwargs: Any) -> None:
            self._backwards_running += 1
            try:
                backward(*args, **kwargs)
            finally:
                self._backwards_running -= 1
            self.num_backwards += not self._backwards_running

        return counted
