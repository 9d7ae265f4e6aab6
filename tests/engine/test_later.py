"""Work in a child process: its result, its failures, and what the user's interrupts do to it."""

import os
import signal
import time

import pytest

from torchecho.engine.later import Later
from torchecho.errors import EchoError


def test_result_and_failure_come_back() -> None:
    assert Later(os.getpid).result() != os.getpid()
    with pytest.raises(EchoError, match="KeyError: 7"):
        Later(lambda: {}[7]).result()


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
