"""Run one job in a fresh process: a request goes in as JSON, progress and one answer come back as JSON lines."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from torchecho import errors
from torchecho.errors import EchoError

Tell = Callable[[str], None]
"""Takes one line of progress."""

_WORKER = "torchecho.bench.worker"


def run_job(job: str, arguments: Mapping[str, object], tell: Tell) -> Any:
    """Run a job of the worker in a process of its own and return its answer.

    The process ends with this call, also when the call is interrupted, and with this process, however that ends.

    Args:
        job: Name of the job in `torchecho.bench.jobs`.
        arguments: Its keyword arguments, as JSON holds them.
        tell: Gets the job's progress.

    Raises:
        EchoError: what the job raised, or that the process ended without an answer.
    """
    process = None
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        try:
            with _interrupts_held_back():  # in the middle of it, nobody would know of the process
                process = _start(complaints)
            return _converse(process, {"job": job, "arguments": arguments}, tell, complaints)
        finally:
            if process is not None:
                _end(process)


def _start(complaints: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 - this interpreter and a module of this package
        [sys.executable, "-m", _WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
        text=True,
        start_new_session=True,  # a Ctrl-C on the terminal is for the parent, which then ends the whole session
    )


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let a Ctrl-C that comes inside have its effect at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # which no interrupt reaches
        return
    held: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if usual is None else usual)  # None: not set by Python
        if held:
            signal.raise_signal(signal.SIGINT)


def _converse(process: subprocess.Popen[str], request: Mapping[str, object], tell: Tell, complaints: IO[str]) -> Any:
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise EchoError(_death(process, complaints)) from None
    for line in process.stdout:
        message = json.loads(line)
        if "progress" in message:
            tell(message["progress"])
        elif "error" in message:
            raise _error_kind(message["kind"])(message["error"])
        else:
            return message["answer"]
    raise EchoError(_death(process, complaints))


def _error_kind(name: str) -> type[EchoError]:
    kind = getattr(errors, name, EchoError)
    return kind if isinstance(kind, type) and issubclass(kind, EchoError) else EchoError


def _death(process: subprocess.Popen[str], complaints: IO[str]) -> str:
    code = process.wait()
    complaints.seek(0)
    lines = [line.strip() for line in complaints if line.strip()]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"the measuring process ended without a result ({how}): {lines[-1] if lines else 'it said nothing'}"


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
