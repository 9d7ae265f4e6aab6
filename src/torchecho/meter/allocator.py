"""Exact live bytes of the CPU: a counting allocator, built at first use with the system's C++ compiler.

The allocator wraps PyTorch's own (`allocator.cpp` says how) and costs about 0.1 us an allocation. It counts the bytes
that are asked for, before alignment. Not seen: tensors born before `install`, memory that did not come from PyTorch's
allocator (NumPy arrays, mapped files, scratch pads inside oneDNN and MKL).
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import threading
from pathlib import Path

import torch

from torchecho.cache import cache_folder, replacing
from torchecho.errors import MeasureError

_logger = logging.getLogger("torchecho")
_install_lock = threading.Lock()
_SOURCE = Path(__file__).with_name("allocator.cpp")
_TORCH = Path(torch.__file__).parent
_COMPILERS = ("g++", "c++", "clang++")


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
    except (MeasureError, OSError) as error:
        _logger.info("no counting allocator: %s", error)
        return str(error)
    if not library.torchecho_install():
        return "another CPU allocator is in place that cannot be wrapped"
    before = library.torchecho_live()
    probe = torch.empty(1, dtype=torch.uint8, device="cpu")
    counted = library.torchecho_live() - before >= probe.nbytes
    return library if counted else "another CPU allocator took the place of the counting one"


def _loaded_library() -> ctypes.CDLL:
    path = _library_path(compiler := _find_compiler())
    try:
        return _load(path)
    except OSError as error:
        if path.exists():
            _logger.warning("building %s again, it cannot be loaded: %s", path, error)
    with replacing(path) as temporary:
        _compile(compiler, temporary)
    return _load(path)


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in ("live", "peak", "num_events", "events", "size_of"):
        getattr(library, f"torchecho_{name}").restype = ctypes.c_int64
    library.torchecho_size_of.argtypes = [ctypes.c_void_p]
    library.torchecho_events.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
    return library


def _library_path(compiler: list[str]) -> Path:
    """Return where the cache keeps the library for this source, torch and compiler."""
    key = hashlib.sha256(_SOURCE.read_bytes())
    for part in (torch.__version__, platform.machine(), *_flags(), *compiler, _compiler_version(compiler)):
        key.update(part.encode() + b"\0")
    return cache_folder() / f"allocator-{key.hexdigest()[:16]}.so"


def _find_compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    commands = [shlex.split(chosen)] if chosen else [[name] for name in _COMPILERS]
    for command in commands:
        if command and shutil.which(command[0]):
            return command
    asked = f"CXX={chosen}" if chosen else ", ".join(_COMPILERS)
    raise MeasureError(f"no C++ compiler found (looked for {asked}); install one or set CXX")


def _flags() -> list[str]:
    abi = int(torch.compiled_with_cxx11_abi())
    return ["-O2", "-shared", "-fPIC", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]


def _compiler_version(compiler: list[str]) -> str:
    return _run([*compiler, "--version"]).partition("\n")[0]


def _compile(compiler: list[str], output: Path) -> None:
    library_folder = _TORCH / "lib"
    paths = [f"-I{_TORCH / 'include'}", f"-L{library_folder}", f"-Wl,-rpath,{library_folder}"]
    _run([*compiler, *_flags(), str(_SOURCE), "-o", str(output), *paths, "-lc10"])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the user's own compiler
    if done.returncode != 0:
        raise MeasureError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
