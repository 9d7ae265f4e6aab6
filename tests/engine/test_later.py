"""Work in a child process: its result, its failures, standing still, and what the user's interrupts do to it."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from torchecho.engine.later import Later, held_back, is_held_back
from torchecho.errors import EchoError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at the state of the child where Linux tells it")


def _wait(later: Later[int]) -> None:
    while not later.is_done():
        time.sleep(0.01)


def test_result_is_that_of_the_work() -> None:
    assert Later(lambda: 6 * 7).result() == 42


def test_failure_is_told_in_its_own_words() -> None:
    later = Later(lambda: 1 // 0)
    with pytest.raises(EchoError, match="ZeroDivisionError: integer division"):
        later.result()


def test_work_stands_still_while_it_is_held_back() -> None:
    reader, writer = os.pipe()
    later = Later(lambda: os.write(writer, os.read(reader, 1)))  # waits for a byte, and passes it on
    with held_back():
        assert is_held_back()
        os.write(writer, b"x")
        state = _state_once_stopped(later)
        assert not later.is_done()  # though there is a byte to read
    assert state == "T"
    assert not is_held_back()
    _wait(later)
    assert later.result() == 1
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    os.close(writer)


def _state_once_stopped(later: Later[int]) -> str:
    """Return the state of the child; the signal takes a moment to arrive."""
    state = ""
    for _ in range(500):
        state = Path(f"/proc/{later._child}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        if state == "T":
            break
        time.sleep(0.01)
    return state


def test_a_child_that_is_killed_is_named() -> None:
    with pytest.raises(EchoError, match="the planning process was killed"):
        Later(lambda: os.kill(os.getpid(), signal.SIGKILL)).result()


def test_an_interrupt_of_the_training_leaves_the_work_alone() -> None:
    def work() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return 7

    assert Later(work).result() == 7


def test_work_that_nobody_waits_for_ends() -> None:
    later = Later(lambda: time.sleep(60))
    child = later._child
    assert child is not None
    del later
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
