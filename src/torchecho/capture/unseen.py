"""What a recorder cannot watch: nodes of the backward that run by themselves, memory that no call allocates."""

import torch

from torchecho.capture.recording import LAYOUT_BITS, Log

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


def grown_bytes(log: Log) -> int:
    """Return the bytes that are alive now and were not when a step began, less those that were and are not.

    Args:
        log: What was written down of the step so far.
    """
    lifted = (sights[0] >> LAYOUT_BITS for func, sights in zip(log.funcs, log.sights, strict=True) if func is _LIFT)
    fresh = {*lifted, *log.apart}
    return sum(
        size_bytes * ((number not in log.freed) - (producer is None and number not in fresh))
        for number, (size_bytes, producer) in enumerate(zip(log.size_bytes, log.producers, strict=True))
    )
