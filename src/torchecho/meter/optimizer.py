"""Bytes of an optimizer's state, also before its first step."""

import copy
import logging
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

_logger = logging.getLogger("torchecho")


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state after its first step.

    A state that is not there yet is found by a step of a copy on fake tensors, which allocates nothing. An optimizer
    that cannot step on fake tensors counts as its present state.
    """
    present = _state_bytes(optimizer)
    if present:
        return present
    try:
        return _state_bytes(_stepped_copy(optimizer))
    except Exception as error:  # noqa: BLE001 - a user's optimizer may do anything in its step
        _logger.warning(
            "cannot foresee the state of %s (%s): it is not in the footprint", type(optimizer).__name__, error
        )
        return 0


def _stepped_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    mode = FakeTensorMode()
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memo[id(parameter)] = torch.nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
    twin = copy.deepcopy(optimizer, memo)
    with mode:
        for group in twin.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        twin.step()
    return twin


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = {
        id(value): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(tensors.values())
