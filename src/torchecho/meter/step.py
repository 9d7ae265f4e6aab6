"""Measure one training step: exact peak of live bytes, timeline and seconds."""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch._C import DisableTorchFunctionSubclass

from torchecho.errors import MeasureError
from torchecho.meter import allocator
from torchecho.meter.cuda import CudaCounter
from torchecho.meter.probe import PeakProbe, resolve_device
from torchecho.meter.profiler import profiled_events
from torchecho.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a training step used.

    Attributes:
        peak_bytes: Most bytes live at once during the step, base included.
        base_bytes: Bytes live before the step: parameters, optimizer state, inputs, all else that the process holds.
        seconds: Median duration of the step.
        timeline: Live bytes after each allocation and free (on CUDA only start, peak and end).
    """

    peak_bytes: int
    base_bytes: int
    seconds: float
    timeline: Timeline


def measure(
    step: Callable[[], object], *, warmup: int = 1, repeats: int = 1, device: torch.device | str | None = None
) -> Measurement:
    """Run a training step and measure it.

    On the CPU the bytes are those asked of PyTorch's allocator, counted exactly. Tensors born before the counting began
    are found through the garbage collector, so a first call should have a warm-up: a step that frees such a tensor is
    charged for it. What only C++ holds from before the counting began (an old autograd graph) is not seen.
    Without a C++ compiler the profiler counts instead, in `warmup` + 1 more runs; it reports the same numbers.

    Args:
        step: Does one training step; what it returns is dropped.
        warmup: Runs before the measured ones.
        repeats: Measured runs; the run with the highest peak gives the bytes, all of them the seconds.
        device: Device to watch; None: the current CUDA device when CUDA is in use, else the CPU.

    Raises:
        MeasureError: a count is out of range, or the device is neither a CPU nor CUDA.
    """
    if warmup < 0:
        raise MeasureError(f"measure: warmup must be 0 or more runs before the measured ones; got {warmup}")
    if repeats < 1:
        raise MeasureError(f"measure: repeats must be 1 or more measured runs; got {repeats}")
    # The counting begins before the warm-up, so that the tensors the steps hand on to each other are known.
    counted = resolve_device(device).type == "cpu" and allocator.available()
    for _ in range(warmup):
        step()
    where = resolve_device(device)
    if where.type == "cuda":
        return _summary([_run_on_cuda(step, where) for _ in range(repeats)])
    if where.type != "cpu":
        raise MeasureError(f"cannot measure on {where}: torchecho measures cpu and cuda devices")
    if counted:
        return _summary([_run_on_cpu(step) for _ in range(repeats)])
    seconds = [seconds_of(step) for _ in range(repeats)]
    return _measurement(_profiled_timeline(step, max(1, warmup)), statistics.median(seconds))


def _run_on_cpu(step: Callable[[], object]) -> Measurement:
    gc.collect()
    base_bytes = allocator.live_bytes() + _foreign_bytes()
    allocator.record_events(True)
    try:
        seconds = seconds_of(step)
    finally:
        allocator.record_events(False)
    return _measurement(_timeline(base_bytes, allocator.events()), seconds)


def _run_on_cuda(step: Callable[[], object], device: torch.device) -> Measurement:
    counter = CudaCounter(device)
    gc.collect()
    counter.synchronize()
    base_bytes = counter.live_bytes()

    def synchronized_step() -> None:
        step()
        counter.synchronize()

    with PeakProbe(device) as probe:
        seconds = seconds_of(synchronized_step)
        peak_bytes = base_bytes + probe.read()
    live_bytes = (base_bytes, peak_bytes, counter.live_bytes())
    return _measurement(Timeline(live_bytes, base_bytes, labels=("start", "peak", "end")), seconds)


def _profiled_timeline(step: Callable[[], object], warmup: int) -> Timeline:
    base_bytes = 0

    def note_base() -> None:
        nonlocal base_bytes
        gc.collect()
        base_bytes = sum(size for _, size in _cpu_storages())

    events = profiled_events(step, warmup=warmup, on_start=note_base)
    return _timeline(base_bytes, events)


def _timeline(base_bytes: int, events: list[int]) -> Timeline:
    live_bytes = itertools.accumulate(events, initial=base_bytes)
    return Timeline(tuple(live_bytes)[1:], base_bytes)


def _measurement(timeline: Timeline, seconds: float) -> Measurement:
    return Measurement(timeline.peak_bytes, timeline.base_bytes, seconds, timeline)


def _summary(runs: list[Measurement]) -> Measurement:
    highest = max(runs, key=lambda run: run.peak_bytes)
    return _measurement(highest.timeline, statistics.median(run.seconds for run in runs))


def seconds_of(step: Callable[[], object]) -> float:
    """Run a step once and return its seconds."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _foreign_bytes() -> int:
    """Bytes of the storages that the counting allocator did not make: older ones, NumPy arrays, mapped files."""
    return sum(size for pointer, size in _cpu_storages() if allocator.counted_bytes(pointer) is None)


def _cpu_storages() -> Iterator[tuple[int, int]]:
    """Pointer and bytes of each CPU storage that a live tensor of the process looks at, each once."""
    seen: set[int] = {0}
    with DisableTorchFunctionSubclass():  # tensor subclasses must not run code of theirs here
        for tensor in _tensors():
            pointer, size_bytes = _cpu_storage(tensor)
            if pointer not in seen:
                seen.add(pointer)
                yield pointer, size_bytes


def _cpu_storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Pointer and bytes of a tensor's storage; zeros when it has none on the CPU (fake ones live on meta)."""
    try:
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if storage.device.type == "cpu" else (0, 0)
    except (RuntimeError, NotImplementedError):  # sparse, functional and wrapper tensors have no storage of their own
        return 0, 0


def _tensors() -> Iterator[torch.Tensor]:
    """Tensors that the garbage collector knows, and their gradients, which C++ may hold alone."""
    # The type is asked instead of isinstance, which would run the __class__ of foreign lazy objects.
    for tensor in [candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.Tensor)]:
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad
