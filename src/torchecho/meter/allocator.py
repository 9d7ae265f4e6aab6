"""Exact live bytes of the CPU: a counting allocator, built at first use with the system's C++ compiler.

The allocator wraps PyTorch's own (`allocator.cpp` says how) and costs about 0.1 us an allocation. It counts the bytes
that are asked for, before alignment. Not seen: tensors born before `install`, memory that did not come from PyTorch's
allocator (NumPy arrays, mapped files, scratch pads inside oneDNN and MKL).
"""

import ctypes
import functools
import logging
import threading
from pathlib import Path

import torch

from torchecho.compiler import load_library
from torchecho.errors import BuildError, MeasureError

_logger = logging.getLogger("torchecho")
_install_lock = threading.Lock()
_SOURCE = Path(__file__).with_name("allocator.cpp")
_TORCH = Path(torch.__file__).parent


def install() -> None:
    """Build the counting allocator if need be and put it in place; later calls do nothing.

    Raises:
        MeasureError: there is no compiler, the build failed, or another allocator does not let itself be wrapped.
    """
    _installed_library()


def available() -> bool:
    """Install the counting allocator; say whether that worked, with one logged note when not."""
    with _install_lock:
        return isinstance(_library_or_reason(), ctypes.CDLL)


def live_bytes() -> int:
    """Return the live bytes that were allocated since `install`."""
    return int(_installed_library().torchecho_live())


def peak_bytes() -> int:
    """Return the most live bytes since the last `reset_peak`.

    The counter is one for the whole process: `PeakProbe` shares it out among nested users.
    """
    return int(_installed_library().torchecho_peak())


def reset_peak() -> None:
    """Start a new peak at what is live now. Open probes lose what they have not read: use `PeakProbe` instead."""
    _installed_library().torchecho_reset_peak()


def counted_bytes(pointer: int) -> int | None:
    """Return the bytes of the live allocation at `pointer`; None when the counting allocator did not make it."""
    size = int(_installed_library().torchecho_size_of(pointer))
    return None if size < 0 else size


def record_events(on: bool) -> None:  # noqa: FBT001 - reads as a switch
    """Begin to record allocations and frees afresh, or stop recording."""
    _installed_library().torchecho_record(int(on))


def events() -> list[int]:
    """Return the recorded events in order: bytes allocated, or freed with a minus sign."""
    library = _installed_library()
    buffer = (ctypes.c_int64 * int(library.torchecho_num_events()))()
    copied = library.torchecho_events(buffer, len(buffer))
    return list(buffer[:copied])


def _installed_library() -> ctypes.CDLL:
    with _install_lock:
        library = _library_or_reason()
    if isinstance(library, str):
        raise MeasureError(f"cannot count the live bytes of the CPU exactly: {library}")
    return library


@functools.cache
def _library_or_reason() -> ctypes.CDLL | str:
    """Return the library, installed, or why there is none; tried once in a process."""
    try:
        library = _loaded_library()
    except (BuildError, OSError) as error:
        _logger.info("no counting allocator: %s", error)
        return str(error)
    if not library.torchecho_install():
        return "another CPU allocator is in place that cannot be wrapped"
    before = library.torchecho_live()
    probe = torch.empty(1, dtype=torch.uint8, device="cpu")
    counted = library.torchecho_live() - before >= probe.nbytes
    return library if counted else "another CPU allocator took the place of the counting one"


def _loaded_library() -> ctypes.CDLL:
    folder = _TORCH / "lib"
    links = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lc10"]
    library = load_library("allocator", _SOURCE, (), [_flags()], links)
    for name in ("live", "peak", "num_events", "events", "size_of"):
        getattr(library, f"torchecho_{name}").restype = ctypes.c_int64
    library.torchecho_size_of.argtypes = [ctypes.c_void_p]
    library.torchecho_events.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
    return library


def _flags() -> list[str]:
    abi = int(torch.compiled_with_cxx11_abi())
    # The version names no symbol: it makes another torch in the same folder build anew.
    built_for = f"-DTORCHECHO_BUILT_FOR={torch.__version__}"
    return ["-O2", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{_TORCH / 'include'}", built_for]
