"""Tell which storage is behind a tensor, and look at it with another.

Relies on ``UntypedStorage._cdata`` as the identity of a storage (torch 2.11 to 2.15).
"""

import torch
from torch import nn
from torch._subclasses import FakeTensor

_PLAIN_TYPES = frozenset({torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor})


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return the identity of the storage behind a tensor; None for a tensor that has none, or is a subclass."""
    if type(tensor) not in _PLAIN_TYPES or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    key: int = tensor.untyped_storage()._cdata
    return key


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor on the same storage, which is no part of the autograd graph and no call of the program."""
    if type(tensor) is FakeTensor:  # without its mode it would be a tensor without data; the recorder is paused here
        return tensor.detach()
    guard = torch._C._DisableTorchDispatch()
    made = tensor.detach()
    del guard
    return made
