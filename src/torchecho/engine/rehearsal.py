"""Rehearse a step on fake tensors: record it before any memory is taken."""

import contextlib
import copy
import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import _get_mkldnn_enabled  # private: the public one is no plain flag to a type checker
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only

from torchecho.capture.recording import Recording
from torchecho.capture.tape import Recorder
from torchecho.engine import scope
from torchecho.engine.modules import ModulePath, buffers_of
from torchecho.engine.nodes import reachable, watch_sums
from torchecho.errors import CaptureError


def rehearse(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, must_match: bool = False
) -> Recording:
    """Record one step of a copy of a model on fake tensors: its forward, and the backward of all that it returns.

    The loss, where it is not in the model, is not known: the backward begins with a gradient for each output. Streams
    of random numbers stay as they were; whatever else the forward does to the world outside the model, it does.

    Args:
        model: Model to rehearse; it is not touched.
        args: Positional arguments of one training batch.
        kwargs: Keyword arguments of it.
        must_match: Fail where a real step is known to make other calls than its rehearsal.

    Raises:
        CaptureError: the forward cannot run on fake tensors.
    """
    with without_values(model):
        return _rehearse(model, args, kwargs, must_match=must_match)


@contextlib.contextmanager
def without_values(model: nn.Module) -> Iterator[None]:
    """Tell of a model that looks at values while it runs on fake tensors inside.

    Raises:
        CaptureError: it does.
    """
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be planned before it runs: {error} needs values, and there are none yet;"
            " call torchecho.optimize(model) and read torchecho.plans() after its first step"
        ) from error


def _rehearse(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, must_match: bool) -> Recording:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin, fake_args, fake_kwargs = fake_copy(mode, model, args, kwargs)
    if must_match:
        for name, layer in twin.named_modules():
            if type(layer) is nn.LSTM:
                layer.register_forward_pre_hook(functools.partial(_check_kernels, name))
    path = ModulePath(twin)
    recorder = Recorder(torch.Tensor.detach, _give, path.current)
    with mode, torch.enable_grad(), _random_state_kept():
        recorder.know_sources(leaf for leaf in tree_leaves((fake_args, fake_kwargs)) if isinstance(leaf, torch.Tensor))
        hooks = (recorder.pack, recorder.unpack)
        recorder.know_buffers(buffers_of(twin))
        path.start()
        scope.push_hooks(hooks)
        try:
            with recorder:
                made = twin(*fake_args, **fake_kwargs)
                scope.remove_hooks(hooks)
                tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
                recorder.know_returned(tensors)
                recorder.start_backward()
                outputs = [tensor for tensor in tensors if tensor.requires_grad]
                if not outputs:
                    raise CaptureError(f"{type(model).__name__} returns nothing that has a gradient: nothing to plan")
                roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
                watch_sums(recorder, list(reachable(roots)))
                torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        finally:
            scope.remove_hooks(hooks)
            path.stop()
    return recorder.finish()


def _check_kernels(name: str, layer: nn.LSTM, args: Sequence[Any]) -> None:
    """Refuse what oneDNN computes: its layers have no fake form, so that other calls stand for them in a rehearsal."""
    is_packed = isinstance(args[0], PackedSequence)
    on_cpu = all(parameter.device.type == "cpu" for parameter in layer.parameters())
    if on_cpu and not is_packed and torch.backends.mkldnn.is_available() and _get_mkldnn_enabled():
        raise CaptureError(
            f"its nn.LSTM {name!r} runs in oneDNN on the CPU and has no fake form;"
            " torchecho.nn.convert(model) swaps in a layer that has one"
        )


def fake_copy(
    mode: FakeTensorMode, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a copy of a model, and of its arguments, on fake tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): _fake(mode, tensor) for tensor in tensors})
    fake_args, fake_kwargs = tree_map_only(torch.Tensor, lambda t: _fake(mode, t), (tuple(args), dict(kwargs)))
    return twin, fake_args, fake_kwargs


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    fake = mode.from_tensor(tensor)
    return nn.Parameter(fake.detach(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _give(kept: torch.Tensor) -> torch.Tensor:
    return kept


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    state = random.getstate()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)
