"""Do work in a child process while the training goes on.

The child is a fork: it sees everything as it was and nothing need be sent to it. It must not run tensor operations
(threads of OpenMP and contexts of CUDA do not survive a fork), which planning does not.
"""

import contextlib
import contextvars
import gc
import os
import pickle
import signal
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchecho.errors import EchoError

T = TypeVar("T")
_running: "weakref.WeakSet[Later[Any]]" = weakref.WeakSet()
_KILLED = (False, "the planning process was killed")


def is_elsewhere() -> bool:
    """Return whether work is done in a child process here, and not at once."""
    return hasattr(os, "fork")


class Later(Generic[T]):
    """Work that is being done elsewhere; where processes cannot fork it is done at once.

    Args:
        work: Returns something that can be pickled.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        handle, name = tempfile.mkstemp(prefix="torchecho-")
        os.close(handle)
        self._file = Path(name)
        self._child = _fork(work, self._file) if is_elsewhere() else None
        if self._child is None:
            _write(work, self._file)
        self._cleanup = weakref.finalize(self, _abandon, self._child, self._file)
        _running.add(self)

    def is_done(self) -> bool:
        """Return whether `result` will not wait."""
        if self._child is None:
            return True
        with contextlib.suppress(ChildProcessError):  # someone else has waited for it
            if os.waitpid(self._child, os.WNOHANG) == (0, 0):
                return False
        self._child = None
        return True

    def _signal(self, what: signal.Signals) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, what)

    def result(self) -> T:
        """Return what the work returned, waiting for it; once.

        Raises:
            EchoError: the work failed; the message is that of its error.
        """
        if self._child is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._child, 0)
            self._child = None
        body = self._file.read_bytes()
        self._cleanup.detach()
        self._file.unlink(missing_ok=True)
        answer: tuple[bool, Any] = pickle.loads(body) if body else _KILLED  # noqa: S301 - our own child wrote it
        succeeded, result = answer
        if not succeeded:
            raise EchoError(result)
        made: T = result
        return made


_is_held_back: contextvars.ContextVar[bool] = contextvars.ContextVar("_is_held_back", default=False)


def is_held_back() -> bool:
    """Return whether work is held back."""
    return _is_held_back.get()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let what is being done elsewhere stand still, and nothing new begin: for measuring a step that only follows."""
    stopped = list(_running)
    for one in stopped:
        one._signal(signal.SIGSTOP)  # noqa: SLF001 - of this module
    token = _is_held_back.set(True)
    try:
        yield
    finally:
        _is_held_back.reset(token)
        for one in stopped:
            one._signal(signal.SIGCONT)  # noqa: SLF001 - of this module


def _fork(work: Callable[[], T], file: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads; the child uses none
        child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever interrupts the training may go on with it
        gc.disable()  # destructors of what belongs to the parent must not run here
        with contextlib.suppress(OSError):
            os.nice(19)  # the cores are the training's: this runs when nobody else wants one
        _write(work, file)
    finally:
        os._exit(0)  # no handlers of the parent


def _write(work: Callable[[], T], file: Path) -> None:
    try:
        body = pickle.dumps((True, work()))
    except Exception as error:  # noqa: BLE001 - whatever it is goes to whoever asks for the result
        body = pickle.dumps((False, f"{type(error).__name__}: {error}"))
    file.write_bytes(body)


def _abandon(child: int | None, file: Path) -> None:
    if child is not None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    file.unlink(missing_ok=True)
