"""Exact allocations of a step from PyTorch's profiler: the way without a C++ compiler, and slower.

The profiler does not know the sizes of tensors born before it starts, so it cannot see them freed. Steps run under it
before the one that counts replace what a step usually frees, such as the gradients of the step before.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._profiler import _EventType  # private: the event tree is the only record of single allocations

from torchecho.errors import MeasureError

_MARK = "torchecho::recorded_step"


def profiled_events(
    step: Callable[[], object], *, warmup: int = 1, on_start: Callable[[], None] | None = None
) -> list[int]:
    """Run `step` under the profiler and return its CPU allocations and frees in order.

    Args:
        step: What to run, `warmup` + 1 times.
        warmup: How many runs to profile before the recorded one.
        on_start: Called right before the recorded run.

    Returns:
        Bytes allocated, or freed with a minus sign.

    Raises:
        MeasureError: another profiler is running.
    """
    try:
        profile = _profile(step, warmup, on_start)
    except RuntimeError as error:
        if "profiler is already enabled" not in str(error).lower():
            raise
        raise MeasureError("cannot profile the step: another profiler is running; stop it first") from error
    return _events_after_mark(profile)


def _profile(step: Callable[[], object], warmup: int, on_start: Callable[[], None] | None) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        for _ in range(warmup):
            step()
        if on_start is not None:
            on_start()
        with torch.profiler.record_function(_MARK):
            pass
        step()
    return profile


def _events_after_mark(profile: Any) -> list[int]:
    allocations: list[tuple[int, int]] = []
    mark_ns = 0
    for event in _walk(profile.profiler.kineto_results.experimental_event_tree()):
        if event.tag == _EventType.Allocation:
            if event.extra_fields.device.type == "cpu":
                allocations.append((event.start_time_ns, event.extra_fields.alloc_size))
        elif event.name == _MARK:
            mark_ns = event.start_time_ns
    return [size for start_ns, size in sorted(allocations, key=lambda entry: entry[0]) if start_ns >= mark_ns]


def _walk(roots: list[Any]) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)
