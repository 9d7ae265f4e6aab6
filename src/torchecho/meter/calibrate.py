"""Calibrate a device: matrix FLOP/s, memory bandwidth and launch time, measured once and cached."""

import functools
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes  # private: no public way to leave a fake mode

from torchecho.cost.device import DeviceSpec, load_spec, save_spec, spec_path
from torchecho.meter.cuda import CudaCounter
from torchecho.meter.probe import resolve_device

_BUDGET_SECONDS = 0.05
_MATRIX_SIDE = {"cpu": 768, "cuda": 4096}
_COPY_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
_LAUNCHES = 200


def calibrated_device(device: torch.device | str | None = None) -> DeviceSpec:
    """Return the device's numbers from the cache, measuring them (under a second) when it has none.

    The numbers belong to the device, the torch version and the number of threads. Other work on the machine while they
    are measured makes the device look slower.

    Args:
        device: A CPU or CUDA device; None: the current CUDA device when CUDA is in use, else the CPU.
    """
    where = resolve_device(device)
    path = spec_path(_key(where))
    spec = load_spec(path)
    if spec is None:
        spec = calibrate(where)
        save_spec(spec, path)
    return spec


def calibrate(device: torch.device | str | None = None) -> DeviceSpec:
    """Measure the device's numbers now; the streams of random numbers stay as they were, and tracing modes aside."""
    where = resolve_device(device)
    with _disable_current_modes(), torch.no_grad():
        return DeviceSpec(
            name=device_name(where),
            flops_per_second=_flops_per_second(where, torch.float32),
            bytes_per_second=_bytes_per_second(where),
            launch_seconds=_launch_seconds(where),
            half_flops_per_second=_flops_per_second(where, torch.bfloat16) if where.type == "cuda" else 0.0,
        )


@functools.cache
def device_name(device: torch.device) -> str:
    """Return the name of the device's model; of a CPU with its number of cores."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return model
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)


def _key(device: torch.device) -> str:
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return f"{device_name(device)}|{torch.__version__}|{threads}"


def _flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    side = _MATRIX_SIDE[device.type]
    left = torch.full((side, side), 0.5, dtype=dtype, device=device)
    right, out = torch.full_like(left, 0.25), torch.empty_like(left)
    return 2 * side**3 / _least_seconds(lambda: torch.mm(left, right, out=out), device)


def _bytes_per_second(device: torch.device) -> float:
    source = torch.zeros(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _least_seconds(lambda: target.copy_(source), device)


def _launch_seconds(device: torch.device) -> float:
    one = torch.zeros(1, device=device)
    out = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            torch.add(one, one, out=out)

    return _least_seconds(launch, device) / _LAUNCHES


def _least_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Least duration of a few runs within the time budget, after one warm-up."""
    finish = CudaCounter(device).synchronize if device.type == "cuda" else _nothing
    durations: list[float] = []
    run()
    finish()
    while not durations or sum(durations) < _BUDGET_SECONDS:
        start = time.perf_counter()
        run()
        finish()
        durations.append(time.perf_counter() - start)
    return min(durations)


def _nothing() -> None:
    """CPU ops are done when they return."""
