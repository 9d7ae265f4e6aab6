"""Tell the user what was left undone."""

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

from torchecho.errors import EchoWarning

_PACKAGES = tuple(str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def warn(message: str) -> None:
    """Tell the user what was left undone, at the line of the program that led to it; the training goes on."""
    warnings.warn(f"torchecho: {message}", EchoWarning, stacklevel=1 + _depth_of_program(sys._getframe()))  # noqa: SLF001 - the one way to count frames


def _depth_of_program(frame: FrameType) -> int:
    """Return how many frames lie inside the nearest one that is neither ours nor torch's."""
    depth, outer = 0, frame
    while outer.f_back is not None and _is_inside(outer.f_code.co_filename):
        depth, outer = depth + 1, outer.f_back
    return depth


def _is_inside(file: str) -> bool:
    return file.startswith(_PACKAGES) or file == contextlib.__file__
