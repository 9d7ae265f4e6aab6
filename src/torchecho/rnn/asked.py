"""Which kernels the user asks for."""

import functools
import os


@functools.cache
def asked_variant() -> str:
    """Return the value of ``TORCHECHO_RNN_VARIANT``, read once: small layers call several kernels a millisecond."""
    return os.environ.get("TORCHECHO_RNN_VARIANT", "")
