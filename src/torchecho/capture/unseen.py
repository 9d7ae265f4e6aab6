"""What a recorder cannot watch: nodes of the backward that run by themselves, memory that no call allocates."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch

_LIFT = torch.ops.aten.lift_fresh.default  # called on what torch.tensor() has just made


class WholeNode:
    """Stands for what an autograd node calls, where it ran without being watched.

    Attributes:
        overloadpacket: Itself, with the name of the node, as calls of operators have one.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.overloadpacket = self

    def __str__(self) -> str:
        return self.__name__

    def __call__(self, *args: object) -> None:
        """Cost nothing: it runs once, whatever the plan."""


class _Call(Protocol):
    @property
    def func(self) -> Any: ...
    @property
    def reads(self) -> tuple[int, ...]: ...


class _Storage(Protocol):
    @property
    def size_bytes(self) -> int: ...
    @property
    def producer(self) -> int | None: ...
    @property
    def freed(self) -> int | None: ...


def grown_bytes(calls: Iterable[_Call], storages: Iterable[_Storage]) -> int:
    """Return the bytes that are alive now and were not when a step began, less those that were and are not.

    Args:
        calls: Calls of the step so far.
        storages: What became of each storage so far.
    """
    fresh = {number for call in calls if call.func is _LIFT for number in call.reads}
    return sum(
        record.size_bytes * ((record.freed is None) - (record.producer is None and number not in fresh))
        for number, record in enumerate(storages)
    )
