"""Tell which storage is behind a tensor.

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
