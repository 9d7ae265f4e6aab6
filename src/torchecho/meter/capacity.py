"""What a machine has: cores, the total memory of a device, and what of that is free for a training step."""

import os
from pathlib import Path

import torch

# A tenth stays free: fragmentation, libraries' own workspaces, and other processes are outside the model.
_HEAD_ROOM = 0.9
_MEMINFO = Path("/proc/meminfo")


def available_cores() -> int | None:
    """Return how many cores this process may run on; None when the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def total_bytes(device: torch.device) -> int | None:
    """Return the memory of a device; None when the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not a POSIX system
        return None


def auto_budget_bytes(device: torch.device) -> int | None:
    """Return a budget that a device can hold: what is free now plus what this process has, less head-room."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int((free + torch.cuda.memory_reserved(device)) * _HEAD_ROOM)
    available = _available_bytes()
    return None if available is None else int(available * _HEAD_ROOM)


def _available_bytes() -> int | None:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
