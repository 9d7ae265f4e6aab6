"""Places in a program: the instruction of the training code that a call comes from."""

from collections.abc import Hashable
from pathlib import Path
from types import CodeType, FrameType

import torch

Place = tuple[Hashable, CodeType | None, int]

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def find_place(func: Hashable, frame: FrameType | None) -> Place:
    """Return the place of a call: what is called, and the innermost instruction outside torch and torchecho."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return func, frame.f_code, frame.f_lasti
        frame = frame.f_back
    return func, None, 0


def source_of(place: Place) -> str:
    """Return ``file.py:line`` of a place; empty when no training code is on the stack, but only Python's own."""
    _, code, instruction = place
    if code is None or code.co_filename.startswith("<frozen"):
        return ""
    lines = [line for start, end, line in code.co_lines() if start <= instruction < end]
    return f"{Path(code.co_filename).name}:{lines[0] if lines else code.co_firstlineno}"
