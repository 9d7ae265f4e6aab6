"""The roofline: an op takes as long as its arithmetic or its memory traffic, whichever is longer."""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchecho.cost.device import DeviceSpec
from torchecho.ir.graph import Op, TrainingGraph, Value

_HALF_DTYPES = frozenset({"float16", "bfloat16"})
_BITS_IN_NAME = re.compile(r"(?:float|int|complex|bfloat|bits)(\d+)")


@dataclass(frozen=True, slots=True)
class Roofline:
    """Cost model: launch + max(flops / flops per second, bytes read and written / bytes per second).

    After Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009. Ops whose flops are unknown (0) cost their
    traffic. Not modelled: caches, kernels that reach less than the device's best, reads of a part (gathers count the
    whole table), and workspace, which is 0 but for ops that are known to have some.
    """

    device: DeviceSpec

    def op_seconds(self, op: Op, graph: TrainingGraph) -> float:
        """Return the seconds of one run; 0 for views and marks."""
        if op.is_view or op.is_mark:
            return 0.0
        arithmetic_seconds = op.flops / self._flops_per_second(op, graph) if op.flops else 0.0
        traffic_seconds = op_traffic_bytes(op, graph) / self.device.bytes_per_second
        return self.device.launch_seconds + max(arithmetic_seconds, traffic_seconds)

    def op_workspace_bytes(self, op: Op, graph: TrainingGraph) -> int:  # noqa: ARG002 - the protocol's signature
        """Return what whoever captured the op knows of it: a roofline does not look inside."""
        return op.workspace_bytes

    def _flops_per_second(self, op: Op, graph: TrainingGraph) -> float:
        half = any(graph.values[v].dtype.removeprefix("torch.") in _HALF_DTYPES for v in op.reads)
        return (self.device.half_flops_per_second if half else 0.0) or self.device.flops_per_second


def op_traffic_bytes(op: Op, graph: TrainingGraph) -> int:
    """Return the bytes that an op reads and writes: each distinct value once a direction."""
    return _bytes_of(op.reads, graph) + _bytes_of(op.writes, graph)


def _bytes_of(values: Sequence[int], graph: TrainingGraph) -> int:
    return sum(_value_bytes(graph.values[v], graph) for v in dict.fromkeys(values))


def _value_bytes(value: Value, graph: TrainingGraph) -> int:
    """Bytes of a value; an expanded view has no more than its storage."""
    stored_bytes = graph.storages[value.storage].size_bytes
    item_bytes = _item_bytes(value.dtype)
    return stored_bytes if item_bytes is None else min(stored_bytes, math.prod(value.shape) * item_bytes)


@functools.cache
def _item_bytes(dtype: str) -> int | None:
    """Bytes of one element, read off the dtype's name (``torch.float32``, ``int8``); None when it has none."""
    name = dtype.removeprefix("torch.")
    if name == "bool":
        return 1
    match = _BITS_IN_NAME.search(name)
    return -(-int(match.group(1)) // 8) if match else None
