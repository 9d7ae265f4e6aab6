"""The doors of the eager engine: what opens a pass around a call of the program."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchecho.engine import boundaries
from torchecho.engine.eager import EagerEngine
from torchecho.engine.passes import Pass, begin
from torchecho.engine.planning import Surroundings


def eager_call(model: nn.Module, surroundings: Surroundings) -> Callable[..., Any]:
    """Return what runs a module under the eager engine in place of its own call."""
    engine = EagerEngine(surroundings, model)

    def call(*args: Any, **kwargs: Any) -> Any:
        opened = _begin(engine, (args, kwargs)) if torch.is_grad_enabled() else None
        if opened is None:
            return model._call_impl(*args, **kwargs)  # noqa: SLF001 - what Module.__call__ calls
        try:
            made = model._call_impl(*args, **kwargs)  # noqa: SLF001 - as above
        except BaseException:
            opened.close()
            raise
        opened.call_ended(made)
        return made

    return call


def _begin(engine: EagerEngine, given: Any) -> Pass | None:
    """Open a pass for a call; None where there is nothing to do, or where an open pass takes the call in."""
    current = boundaries.listener()
    if isinstance(current, Pass):
        if current.is_waiting():
            return None
        current.finish()
    return begin(engine, [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)])
