"""Run a module under the compile engine in place of its own call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import trace_rules  # private: tells which files Dynamo skips

from torchecho.backend import compile_piece
from torchecho.engine.dynamo import through_dynamo, without_dynamo
from torchecho.engine.planning import Surroundings
from torchecho.errors import EchoError
from torchecho.options import Options

# Beyond Dynamo's own limit of 8 a function runs untouched without a word: models of one class share it, and so do all
# lengths that a loop over time is unrolled for.
_COMPILES_OF_A_FUNCTION = 256
_COMPILES = 4096


def compiled_call(model: nn.Module, surroundings: Surroundings, dynamic: bool | None) -> Callable[..., Any]:  # noqa: FBT001 - torch.compile's own argument
    """Return what runs a module under the compile engine in place of its own call.

    Args:
        model: Module to run.
        surroundings: What is known of the step around it.
        dynamic: As in ``torch.compile``.
    """
    compiled = torch.compile(_traceable(model), backend=_backend(surroundings), dynamic=dynamic)

    def call(*args: Any, **kwargs: Any) -> Any:
        surroundings.waiting.clear()
        try:
            with dynamo_config.patch(_dynamo_settings(surroundings.options)):
                return compiled(*args, **kwargs)
        except EchoError as error:
            plain = without_dynamo(error)
            if surroundings.on_refusal is not None:
                surroundings.on_refusal(plain)
            raise plain from None

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
