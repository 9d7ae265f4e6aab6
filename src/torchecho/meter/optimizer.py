"""Bytes of an optimizer: its state, also before the first step, and what a step allocates and frees."""

import copy
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode  # private: no public way to see every call below autograd
from torch.utils._pytree import tree_leaves

_logger = logging.getLogger("torchecho")


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Bytes of an optimizer.

    Attributes:
        state_bytes: Its state after the first step.
        step_bytes: The most that a later step has allocated at once and frees again.
    """

    state_bytes: int = 0
    step_bytes: int = 0


class BytesOfOptimizers:
    """The bytes of the optimizers of a step, found out when they are first asked for.

    Args:
        optimizers: Returns them.
    """

    def __init__(self, optimizers: Callable[[], Sequence[torch.optim.Optimizer]]) -> None:
        self._optimizers = optimizers

    def foresee(self) -> None:
        """Find them out now: it takes a second, which the first step need not."""
        _ = self._found

    @functools.cached_property
    def _found(self) -> OptimizerBytes:
        found = [optimizer_bytes(one) for one in self._optimizers()]
        return OptimizerBytes(sum(one.state_bytes for one in found), max((one.step_bytes for one in found), default=0))

    @property
    def state_bytes(self) -> int:
        """Bytes of all their states after the first step."""
        return self._found.state_bytes

    @property
    def step_bytes(self) -> int:
        """The most that a later step of any of them has allocated at once and frees again."""
        return self._found.step_bytes

    @property
    def present_bytes(self) -> int:
        """Bytes of all their states now."""
        return sum(map(state_bytes_now, self._optimizers()))


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> OptimizerBytes:
    """Return the bytes of an optimizer, by two steps of a copy on fake tensors, which allocate nothing.

    An optimizer that cannot step on fake tensors counts as its present state, with a logged warning.
    """
    try:
        twin = _fake_copy(optimizer)
        with twin.mode:
            twin.optimizer.step()
            with _LiveBytes() as live:
                twin.optimizer.step()
        return OptimizerBytes(state_bytes_now(twin.optimizer), live.peak_bytes)
    except Exception as error:  # noqa: BLE001 - a user's optimizer may do anything in its step
        present = state_bytes_now(optimizer)
        _logger.warning("cannot foresee the steps of %s (%s)", type(optimizer).__name__, error)
        return OptimizerBytes(present, 0)


@dataclass(frozen=True)
class _Twin:
    """A copy of an optimizer on fake tensors, its gradients in place."""

    optimizer: torch.optim.Optimizer
    mode: FakeTensorMode


def _fake_copy(optimizer: torch.optim.Optimizer) -> _Twin:
    mode = FakeTensorMode()
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memo[id(parameter)] = torch.nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
    for value in (v for state in optimizer.state.values() for v in state.values()):
        if isinstance(value, torch.Tensor):
            memo[id(value)] = _fake_state(mode, value)
    with mode:  # optimizers make their counts of steps anew when they are copied
        twin = copy.deepcopy(optimizer, memo)
        for group in twin.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    return _Twin(twin, mode)


def _fake_state(mode: FakeTensorMode, value: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like a value of the state; a number without dimensions, such as a count, keeps its value."""
    if value.dim():
        return mode.from_tensor(value)
    number = value.item()
    with mode:
        return torch.tensor(number, dtype=value.dtype)


@dataclass
class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is active, and their peak."""

    live_bytes: int = 0
    peak_bytes: int = 0
    users: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {id(leaf) for leaf in tree_leaves((args, dict(kwargs or {})))}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in given:
                self._count(tensor, is_new=not func.is_view)
        return made

    def _count(self, tensor: torch.Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        key, size_bytes = storage._cdata, storage.nbytes()  # noqa: SLF001 - its identity; fake ones have no address
        if key not in self.users and not is_new:
            return
        if key not in self.users:
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.users[key] = self.users.get(key, 0) + 1
        weakref.finalize(tensor, self._drop, key, size_bytes)

    def _drop(self, key: int, size_bytes: int) -> None:
        self.users[key] -= 1
        if not self.users[key]:
            del self.users[key]
            self.live_bytes -= size_bytes


def state_bytes_now(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state that an optimizer has now."""
    tensors = {
        id(value): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(tensors.values())
