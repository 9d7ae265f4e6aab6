"""Do work in another process while the training goes on.

The other process is a new Python that is handed the work as a pickle. It never was part of the training: no page of the
training's memory is copied for it, no thread or device context is missing in it, and what planning needs is imported
in a third of a second, since that is not torch.
"""

import contextlib
import contextvars
import functools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchecho.errors import EchoError

T = TypeVar("T")
_running: "weakref.WeakSet[Later[Any]]" = weakref.WeakSet()
_KILLED = (False, "the planning process was killed")
_BEGIN = "import sys; sys.path[:] = sys.argv[5:]; from torchecho.engine.later import work; work(*sys.argv[1:5])"
_SLICE_SECONDS = 0.002
# Of a process with a core to itself, and of one that is given a share: between threads that wait for each other without
# sleeping, a process of niceness 19 gets a hundredth of a core whatever its share, and takes 20 times as long.
_NICENESS, _NICENESS_OF_SHARE = 19, 5
_LONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def is_elsewhere() -> bool:
    """Return whether work is done in another process here, and not at once."""
    return bool(sys.executable)


class Later(Generic[T]):
    """Work that is being done elsewhere; where no other Python can be started it is done at once.

    Args:
        task: Returns something that can be pickled, and can be pickled itself.
        share: Of a core, that it takes at most, a little at a time; 1 where a core is free for it.
    """

    def __init__(self, task: Callable[[], T], *, share: float = 1.0) -> None:
        body = pickle.dumps(task)
        folder = Path(tempfile.mkdtemp(prefix="torchecho-"))
        asked, self._answer = folder / "task", folder / "answer"
        asked.write_bytes(body)
        self._process = _start(asked, self._answer, share)
        self._end = weakref.finalize(self, _end, self._process, folder)
        if self._process is None:
            _do(asked, self._answer)
        _running.add(self)

    def is_done(self) -> bool:
        """Return whether `result` will not wait."""
        return self._process is None or self._process.poll() is not None

    def _signal(self, what: str) -> None:
        if self._process is not None and hasattr(signal, what):
            self._process.send_signal(getattr(signal, what))  # does nothing when the process has ended

    def result(self) -> T:
        """Return what the task returned, waiting for it; once.

        Raises:
            EchoError: the task failed; the message is that of its error.
        """
        if self._process is not None:
            self._process.wait()
        body = self._answer.read_bytes() if self._answer.exists() else None
        self._end()
        answer: tuple[bool, Any] = _KILLED if body is None else pickle.loads(body)  # noqa: S301 - our process wrote it
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
        one._signal("SIGSTOP")  # noqa: SLF001 - of this module
    token = _is_held_back.set(True)
    try:
        yield
    finally:
        _is_held_back.reset(token)
        for one in stopped:
            one._signal("SIGCONT")  # noqa: SLF001 - of this module


def _start(asked: Path, answer: Path, share: float) -> "subprocess.Popen[bytes] | None":
    """Start the process; its session is its own, so that an interrupt from the terminal is for the training alone."""
    if not is_elsewhere():
        return None
    null = subprocess.DEVNULL
    command = [sys.executable, "-c", _BEGIN, str(asked), str(answer), str(share), str(os.getpid()), *sys.path]
    with contextlib.suppress(OSError):
        return subprocess.Popen(  # noqa: S603 - this very Python
            command, stdin=null, stdout=null, stderr=null, env={**os.environ, **_LONE_THREAD}, start_new_session=True
        )
    return None


def work(asked: str, answer: str, share: str, training: str) -> None:
    """Do a task that lies in a file, in a process of its own that takes at most a share of a core.

    It ends with the process that trains, whatever ended that, and the folder of the file with it.
    """
    part, end_without_training = float(share), functools.partial(_end_without, int(training), Path(asked).parent)
    if hasattr(os, "nice"):
        os.nice(_NICENESS if part == 1.0 else _NICENESS_OF_SHARE)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGVTALRM, _Share(part, end_without_training).pause)
        signal.setitimer(signal.ITIMER_VIRTUAL, _SLICE_SECONDS, _SLICE_SECONDS)
    _do(Path(asked), Path(answer))
    end_without_training()


def _end_without(training: int, folder: Path) -> None:
    """End at once, and remove the folder, when the process that trains has ended."""
    if os.getppid() != training:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


class _Share:
    """Keeps this process to a share of a core: it sleeps after each slice for as long as that makes it.

    What a slice has taken is measured: a timer of processor time goes off with the kernel's ticks, 4 ms apart as often
    as not, so that a slice may be twice as long as it was to be.

    Args:
        part: The share.
        end_without_training: Ends this process when the one that trains has ended.
    """

    def __init__(self, part: float, end_without_training: Callable[[], None]) -> None:
        self._part, self._end_without_training = part, end_without_training
        self._woke = time.process_time()

    def pause(self, *_: object) -> None:
        """Sleep; or end without the training."""
        self._end_without_training()
        time.sleep(pause_seconds(time.process_time() - self._woke, self._part))
        self._woke = time.process_time()


def pause_seconds(busy_seconds: float, share: float) -> float:
    """Return how long to rest after being busy so as to be busy for a share of the time."""
    return max(busy_seconds, 0.0) * (1 / share - 1)


def _do(asked: Path, answer: Path) -> None:
    """Put what a task returns, or why it failed, into a file."""
    try:
        task = pickle.loads(asked.read_bytes())  # noqa: S301 - the training wrote it
        body = pickle.dumps((True, task()))
    except Exception as error:  # noqa: BLE001 - whatever it is goes to whoever asks for the result
        body = pickle.dumps((False, f"{type(error).__name__}: {error}"))
    written = answer.with_suffix(".part")
    written.write_bytes(body)
    written.replace(answer)


def _end(process: "subprocess.Popen[bytes] | None", folder: Path) -> None:
    if process is not None:
        process.kill()  # does nothing when it has ended
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
