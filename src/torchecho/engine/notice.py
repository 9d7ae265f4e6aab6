"""Tell the user what was left undone."""

import warnings

from torchecho.errors import EchoWarning


def warn(message: str) -> None:
    """Tell the user what was left undone; the training goes on."""
    warnings.warn(f"torchecho: {message}", EchoWarning, stacklevel=3)
