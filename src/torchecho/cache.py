"""The cache folder, and JSON files in it that survive crashes, races and damage."""

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # a system without POSIX locks: concurrent writers may then lose each other's additions
    fcntl = None  # type: ignore[assignment]  # mypy knows only the module

_logger = logging.getLogger("torchecho")


def cache_folder() -> Path:
    """Return the folder for everything torchecho keeps: ``$TORCHECHO_CACHE``, else ``~/.cache/torchecho``."""
    chosen = os.environ.get("TORCHECHO_CACHE")
    return Path(chosen).expanduser() if chosen else Path("~/.cache/torchecho").expanduser()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the path of an empty temporary file beside `path` that replaces it when the block succeeds.

    Readers see the old file or the whole new one, never a part. Missing folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(name)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that processes of this machine take before they read, change and write `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("a") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_json(path: Path, kind: str, body: Mapping[str, Any]) -> None:
    """Write `body` atomically.

    Args:
        path: File to write; its folder is made when missing.
        kind: Format and version, such as ``"cost-table/1"``; `read_json` asks for the same.
        body: JSON types only.

    Raises:
        OSError: the folder cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"torchecho": kind, **body}), encoding="utf-8")


def read_json(path: Path, kind: str) -> dict[str, Any] | None:
    """Read what `write_json` wrote; None when there is no such file.

    A file that cannot be read, is not JSON, or is of another kind or version is ignored with one logged warning.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _logger.warning("ignoring the damaged cache file %s: %s", path, error)
        return None
    found = body.pop("torchecho", None) if isinstance(body, dict) else None
    if found != kind:
        _logger.warning("ignoring the cache file %s: expected kind %r, found %r", path, kind, found)
        return None
    return dict(body)
