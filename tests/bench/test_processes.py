import os
import signal
import subprocess
import sys
import time

import pytest

from torchecho.bench import processes
from torchecho.bench.processes import run_job
from torchecho.errors import BudgetError, EchoError

# Jobs without torch; the worker imports them in place of the real ones.
STUB = """
import os, time, warnings
from torchecho.errors import BudgetError, EchoWarning
def echo(tell, **arguments):
    tell("one"); print("stray text"); warnings.warn("careful", EchoWarning)
    return arguments
def budget(tell):
    raise BudgetError("too small\\n\\nDynamo's advice")
def broken(tell):
    raise ZeroDivisionError("by zero\\nsecond")
def dies(tell):
    os.write(2, b"the last words\\n"); os._exit(9)
def killed(tell):
    os.kill(os.getpid(), 9)
def sleeps(tell):
    tell(str(os.getpid())); time.sleep(600)
JOBS = {f.__name__: f for f in (echo, budget, broken, dies, killed, sleeps)}
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    (tmp_path / "stub_jobs.py").write_text(STUB)
    (tmp_path / "stub_worker.py").write_text(
        "import sys, stub_jobs\n"
        "sys.modules['torchecho.bench.jobs'] = stub_jobs\n"
        "from torchecho.bench.worker import main\n"
        "sys.exit(main())\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(processes, "_WORKER", "stub_worker")


def ended(pid, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_arguments_come_back_and_progress_is_told(stub):
    told = []
    assert run_job("echo", {"a": 1, "b": [2.5, None]}, told.append) == {"a": 1, "b": [2.5, None]}
    assert told == ["one", "warning: careful"]


@pytest.mark.parametrize(
    ("job", "kind", "text"),
    [
        ("budget", BudgetError, "too small"),
        ("broken", EchoError, "broken failed: ZeroDivisionError: by zero"),
        ("dies", EchoError, r"ended without a result \(exit code 9\): the last words"),
        ("killed", EchoError, "signal SIGKILL"),
    ],
)
def test_a_failure_is_one_line_of_its_kind(stub, job, kind, text):
    with pytest.raises(kind, match=text) as caught:
        run_job(job, {}, lambda text: None)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_an_interrupt_leaves_no_process(stub):
    pids = []

    def interrupt(text):
        pids.append(int(text))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job("sleeps", {}, interrupt)
    assert ended(pids[0])


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupt_while_a_process_starts_leaves_none(stub, monkeypatch):
    start, started = processes._start, []

    def interrupted(complaints):
        os.kill(os.getpid(), signal.SIGINT)
        started.append(start(complaints))
        return started[0]

    monkeypatch.setattr(processes, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_job("sleeps", {}, print)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert started[0].returncode == -signal.SIGKILL


def test_a_killed_parent_leaves_no_process(stub):
    code = (
        "from torchecho.bench import processes\n"
        "processes._WORKER = 'stub_worker'\n"
        "processes.run_job('sleeps', {}, lambda text: print(text, flush=True))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert ended(pid)
