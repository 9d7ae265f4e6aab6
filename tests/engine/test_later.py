"""Work in another process: its result, its failures, standing still, and what the user's interrupts do to it."""

import functools
import operator
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchecho.engine import later
from torchecho.engine.later import Later, held_back, is_held_back, pause_seconds
from torchecho.errors import EchoError

_linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the state of a process")


def _imported() -> list[str]:
    return sorted(sys.modules)


def test_result_is_that_of_the_work() -> None:
    one = Later(functools.partial(operator.mul, 6, 7))
    while not one.is_done():
        time.sleep(0.01)
    assert one.result() == 42


def test_failure_is_told_in_its_own_words() -> None:
    one = Later(functools.partial(operator.floordiv, 1, 0))
    with pytest.raises(EchoError, match="ZeroDivisionError: integer division"):
        one.result()


def test_planning_does_not_wait_for_torch_to_be_imported() -> None:
    """What a task imports is what it is made of, and the planner needs no torch."""
    imported = Later(functools.partial(_imported_with, "torchecho.planner.request")).result()
    assert "torchecho.planner.request" in imported
    assert "torch" not in imported


def _imported_with(name: str) -> list[str]:
    __import__(name)
    return _imported()


@_linux_only
def test_work_stands_still_while_it_is_held_back() -> None:
    one = Later(functools.partial(time.sleep, 0))
    with held_back():
        assert is_held_back()
        assert _state_once_stopped(one) == "T"
        assert not one.is_done()
    assert not is_held_back()
    assert one.result() is None


def _state_once_stopped(one: Later[None]) -> str:
    """Return the state of the process; the signal takes a moment to arrive."""
    state = ""
    for _ in range(500):
        assert one._process is not None
        state = Path(f"/proc/{one._process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        if state == "T":
            break
        time.sleep(0.01)
    return state


@pytest.mark.parametrize(("busy_seconds", "share", "rest_seconds"), [(0.004, 0.25, 0.012), (0.5, 1.0, 0.0)])
def test_rest_makes_what_a_slice_has_really_taken_a_share_of_the_time(
    busy_seconds: float, share: float, rest_seconds: float
) -> None:
    assert pause_seconds(busy_seconds, share) == pytest.approx(rest_seconds)


@_linux_only
def test_a_process_that_is_killed_is_named() -> None:
    with pytest.raises(EchoError, match="the planning process was killed"):
        Later(functools.partial(signal.raise_signal, signal.SIGKILL)).result()


@_linux_only
def test_an_interrupt_from_the_terminal_is_not_for_the_work() -> None:
    one = Later(functools.partial(time.sleep, 0))
    assert one._process is not None
    assert os.getsid(one._process.pid) != os.getsid(0)
    one.result()


@_linux_only
def test_work_that_nobody_waits_for_ends() -> None:
    one = Later(functools.partial(time.sleep, 60))
    assert one._process is not None
    child, folder = one._process.pid, one._answer.parent
    del one
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not folder.exists()


_KILLED_TRAINING = """
import functools, os, signal
from torchecho.engine.later import Later
one = Later(functools.partial(exec, "while True: pass"))
print(one._process.pid, one._answer.parent, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@_linux_only
def test_work_ends_when_the_training_is_killed() -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED_TRAINING], capture_output=True, text=True, check=False)
    child, folder = killed.stdout.split()
    for _ in range(1000):
        if not _is_running(int(child)):
            break
        time.sleep(0.01)
    assert not _is_running(int(child))
    assert not Path(folder).exists()


def _is_running(process: int) -> bool:
    """Return whether a process that is not our own runs; one that nobody has waited for has ended all the same."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"


def test_work_is_done_at_once_where_no_python_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    assert not later.is_elsewhere()
    one = Later(functools.partial(operator.mul, 6, 7))
    assert one.is_done()
    assert one.result() == 42
