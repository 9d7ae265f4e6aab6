import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from torchecho.bench.demo import Demo
from torchecho.cli.demo import verdicts
from torchecho.cli.main import main
from torchecho.report.results import ResultRow, Results

COMMAND = [sys.executable, "-c", "import sys; from torchecho.cli.main import main; sys.exit(main())"]


def row(system, **fields):
    return ResultRow(workload="nmt", size="2/2", system=system, **fields)


@pytest.fixture
def shown():
    untouched = row("eager", peak_bytes=4096, losses=(3.0, 2.5), seconds_median=1.0, batch=8)
    reference = row("torchecho", peak_bytes=3072, losses=(3.0, 2.0), seconds_median=1.0)
    planned = row(
        "torchecho",
        peak_bytes=2048,
        predicted_peak_bytes=2048,
        losses=(3.0, 2.0),
        seconds_median=1.25,
        batch=8,
        overhead_predicted=0.25,
    )
    theirs = row("eager", batch=4, seconds_median=2.0)
    ours = row("torchecho", batch=10, seconds_median=2.0)
    return Demo(2048, untouched, reference, planned, theirs, ours, row("torchecho", batch=9, seconds_median=1.0))


def test_verdicts_tell_each_figure(shown):
    text = "\n".join(verdicts(shown))
    assert "4.0 KiB untouched, 2.0 KiB under the budget: 2.00 times less, inside 2.0 KiB" in text
    assert "2.0 KiB was predicted (+0.00 %)" in text
    assert "2 of 2 equal those of the same lowering" in text
    assert "5.0e-01" in text
    assert "1.25 s, 1.00 s with nothing recomputed; +25.0 % was predicted" in text
    assert "torchecho trains a batch of 10, 5 samples/s, at most" in text
    assert "and a batch of 9, 9 samples/s" in text
    assert "eager PyTorch trains a batch of 4, 2 samples/s, at most: 2.5 times fewer" in text


def test_verdicts_hide_no_failure(shown):
    planned = dataclasses.replace(shown.planned, peak_bytes=2049, losses=(3.0, 2.1))
    text = "\n".join(verdicts(dataclasses.replace(shown, planned=planned, largest_untouched=None)))
    assert "OVER 2.0 KiB" in text
    assert "1 of 2 equal" in text
    assert "eager PyTorch trains no batch at all" in text


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--bucket", "24"], "--bucket takes SOURCE:TARGET lengths"),
        (["--bucket", "1:4"], "--bucket takes SOURCE:TARGET lengths"),
        (["--hidden", "3"], "--hidden must be even"),
        (["--memory-budget", "plenty"], "in (0, 1] such as 0.4; got 'plenty'"),
        (["--memory-budget", "auto"], "--memory-budget takes bytes"),
        (["--steps", "0"], "--steps"),
        (["--json", "/nowhere/demo.json"], "its folder does not exist"),
        (["--corpus", "/nowhere/text.tsv"], "/nowhere/text.tsv: cannot be read"),
    ],
)
def test_wrong_usage_is_one_line(args, text, capsys):
    assert main(["demo", *args]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert text in error[0]


def test_a_small_demo_from_end_to_end(tmp_path):
    corpus, figures = tmp_path / "text.tsv", tmp_path / "demo.json"
    corpus.write_text("".join(f"{a}{b}\t{b}{a}\n" for a in "abcdef" for b in "abcdef"))
    args = ["--corpus", str(corpus), "--bucket", "3:3", "--hidden", "16", "--batch", "48", "--steps", "3"]
    args += ["--memory-budget", "0.7", "--json", str(figures)]
    done = subprocess.run([*COMMAND, "demo", *args], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 equal those of the same lowering" in done.stdout
    untouched, reference, planned, theirs, ours, *roomy = Results.from_json(figures.read_text()).rows
    assert planned.losses == reference.losses
    assert planned.losses == pytest.approx(untouched.losses, rel=1e-4)
    assert planned.losses[0] != planned.losses[-1]
    assert planned.peak_bytes <= planned.budget_bytes < untouched.peak_bytes
    assert theirs.peak_bytes <= planned.budget_bytes
    assert all(row.peak_bytes <= planned.budget_bytes for row in (ours, *roomy))
    assert ours.batch >= theirs.batch


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupt_leaves_no_process_behind(tmp_path):
    corpus = tmp_path / "text.tsv"
    corpus.write_text("a\tb\nc\td\ne\tf\n")
    args = ["--corpus", str(corpus), "--bucket", "3:3", "--hidden", "16", "--steps", "1000000"]
    process = subprocess.Popen(
        [*COMMAND, "demo", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert "training untouched" in process.stdout.readline()
    child = wait_for_child(process.pid)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "torchecho: interrupted\n"
    assert not os.path.exists(f"/proc/{child}")  # noqa: PTH110 - a process, not a file


def wait_for_child(pid, seconds=30.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123 - a process, not a file
            children = file.read().split()
        if children:
            return int(children[0])
        time.sleep(0.05)
    raise AssertionError("no child process was started")


def test_help_has_an_example(capsys):
    assert main(["demo", "--help"]) == 0
    assert "Example: torchecho demo" in capsys.readouterr().out
