"""Whether Triton's kernels run a layer."""

import functools
import importlib.util
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from torchecho.rnn.asked import asked_variant

_logger = logging.getLogger("torchecho")
_OLDEST = (8, 0)  # the oldest compute capability for which the kernels are compiled in the tests

#: The types of number that the kernels take; they compute in float32.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def triton_takes(tensors: Sequence[Tensor]) -> bool:
    """Return whether Triton's kernels take these tensors: all on one CUDA device, all of one type of `DTYPES`.

    ``TORCHECHO_RNN_VARIANT=triton`` sends tensors on the CPU to them too, for Triton's interpreter
    (``TRITON_INTERPRET=1``); ``TORCHECHO_RNN_VARIANT=naive`` sends none.
    """
    device, dtype, asked = tensors[0].device, tensors[0].dtype, asked_variant()
    devices = ("cuda", "cpu") if asked == "triton" else ("cuda",)
    if device.type not in devices or asked == "naive" or dtype not in DTYPES:
        return False
    alike = all(t.device == device and t.dtype == dtype for t in tensors)
    return alike and (device.type == "cpu" or triton_runs(device))


def triton_runs(device: torch.device) -> bool:
    """Return whether Triton can be imported and compiles for a CUDA device; if not, one note is logged."""
    return _imported() and _recent_enough(device)


@functools.cache
def _imported() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    _logger.warning("recurrent layers on CUDA run in plain PyTorch, which is slow: Triton is not installed")
    return False


@functools.cache
def _recent_enough(device: torch.device) -> bool:
    # A plan can be made for CUDA on fake tensors where there is no such device.
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= _OLDEST:
        return True
    name = torch.cuda.get_device_name(device)
    _logger.warning(
        "recurrent layers on %s run in plain PyTorch, which is slow: the kernels need compute capability %d.%d",
        name,
        *_OLDEST,
    )
    return False
