"""The device of a step."""

from collections.abc import Iterable

import torch


def device_among(devices: Iterable[torch.device]) -> torch.device:
    """Return the first accelerator, else the CPU: scalars on the CPU and tensors without data may be among the rest."""
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))
