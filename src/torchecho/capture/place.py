"""Places in a program: the instruction of the training code that a call comes from."""

import functools
import os
from collections.abc import Hashable
from pathlib import Path
from types import CodeType, FrameType

import torch

Place = tuple[Hashable, CodeType | None, int]

_HOME = Path(__file__).parents[1]
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, _HOME))
_PROGRAMS = tuple(f"{_HOME / room}{os.sep}" for room in ("bench", "_examples"))  # ours, but trained like anyone's


def find_place(func: Hashable, frame: FrameType | None) -> Place:
    """Return the place of a call: what is called, and the innermost instruction outside torch and torchecho."""
    while frame is not None:
        if not _is_library(frame.f_code.co_filename):
            return func, frame.f_code, frame.f_lasti
        frame = frame.f_back
    return func, None, 0


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) and not file.startswith(_PROGRAMS)


def source_of(place: Place) -> str:
    """Return ``file.py:line`` of a place; empty when no training code is on the stack, but only Python's own."""
    _, code, instruction = place
    if code is None or code.co_filename.startswith("<frozen"):
        return ""
    lines = [line for start, end, line in code.co_lines() if start <= instruction < end]
    return f"{Path(code.co_filename).name}:{lines[0] if lines else code.co_firstlineno}"
