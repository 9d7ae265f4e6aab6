"""Small C++ libraries that torchecho builds for itself: found compiler, cached result, loaded once."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchecho.cache import cache_folder, replacing
from torchecho.errors import BuildError

_logger = logging.getLogger("torchecho")
_COMPILERS = ("g++", "c++", "clang++")


def load_library(
    name: str,
    source: Path,
    headers: Iterable[Path],
    flag_sets: Sequence[Sequence[str]],
    libraries: Sequence[str] = (),
) -> ctypes.CDLL:
    """Load the library built from `source`, from the cache or by the system's compiler.

    Args:
        name: What the file in the cache begins with.
        source: The one file that is compiled.
        headers: Other files that it includes; a change of any builds anew.
        flag_sets: Compiler flags; the first set that the compiler takes is used.
        libraries: What to link with, in the compiler's words.

    Raises:
        BuildError: there is no compiler, or it takes none of the sets of flags.
        OSError: the cache folder cannot be written, or what was built cannot be loaded.
    """
    compiler = _find_compiler()
    files = [source, *sorted(headers)]
    failures = []
    for flags in flag_sets:
        path = cache_folder() / f"{name}-{_key(compiler, files, (*flags, *libraries))}.so"
        try:
            return _built([*compiler, *flags], source, libraries, path)
        except BuildError as error:
            failures.append(str(error))
    raise BuildError("; ".join(failures))


def _built(command: list[str], source: Path, libraries: Sequence[str], path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if path.exists():
            _logger.warning("building %s again, it cannot be loaded: %s", path, error)
    with replacing(path) as temporary:
        _run([*command, "-shared", "-fPIC", str(source), "-o", str(temporary), *libraries])
    return ctypes.CDLL(str(path))


def _key(compiler: list[str], files: Iterable[Path], flags: Iterable[str]) -> str:
    key = hashlib.sha256()
    for file in files:
        key.update(file.read_bytes() + b"\0")
    for part in (platform.machine(), *flags, *compiler, _version(*compiler)):
        key.update(part.encode() + b"\0")
    return key.hexdigest()[:16]


@functools.cache
def _version(*compiler: str) -> str:
    """Return the first line of what a compiler says it is; asked once, for all libraries of a process."""
    return _run([*compiler, "--version"]).partition("\n")[0]


def _find_compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    commands = [shlex.split(chosen)] if chosen else [[name] for name in _COMPILERS]
    for command in commands:
        if command and shutil.which(command[0]):
            return command
    asked = f"CXX={chosen}" if chosen else ", ".join(_COMPILERS)
    raise BuildError(f"no C++ compiler found (looked for {asked}); install one or set CXX")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the user's own compiler
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
