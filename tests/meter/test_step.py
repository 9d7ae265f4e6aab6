import os
import subprocess
import sys

import pytest
import torch

from torchecho.errors import MeasureError
from torchecho.meter import allocator
from torchecho.meter.profiler import profiled_events
from torchecho.meter.step import measure

# y = relu(x w) summed, with x (8, 16) and w (16, 32), float32. The backward of sum expands a scalar: no bytes.
INPUT, WEIGHT, OUTPUT, SCALAR = 8 * 16 * 4, 16 * 32 * 4, 8 * 32 * 4, 4


def make_step():
    x, w = torch.ones(8, 16), torch.ones(16, 32, requires_grad=True)

    def step():
        w.grad = None
        torch.relu(x @ w).sum().backward()

    return step


def test_peak_of_a_small_step_is_the_hand_count():
    measured = measure(make_step(), device="cpu")
    # The step first frees the gradient of the step before.
    start = measured.base_bytes - WEIGHT
    above_start = [
        0,
        OUTPUT,  # x @ w
        OUTPUT + OUTPUT,  # relu, which is saved
        OUTPUT,  # x @ w is dropped
        OUTPUT + SCALAR,  # sum
        OUTPUT + SCALAR * 2,  # gradient of the sum
        OUTPUT * 2 + SCALAR * 2,  # gradient of x @ w
        OUTPUT + SCALAR * 2,  # relu's output is dropped
        OUTPUT + SCALAR * 2 + WEIGHT,  # gradient of w
        SCALAR * 2 + WEIGHT,  # gradient of x @ w is dropped
        SCALAR + WEIGHT,  # the two scalars, when backward returns
        WEIGHT,
    ]
    assert [live - start for live in measured.timeline.live_bytes] == above_start
    assert measured.peak_bytes - start == OUTPUT + SCALAR * 2 + WEIGHT
    assert measured.peak_bytes == measured.timeline.peak_bytes
    assert measured.seconds > 0


def test_profiler_gives_the_same_numbers_as_the_allocator():
    step = make_step()
    measured = measure(step, device="cpu")
    live = measured.base_bytes
    timeline = [live := live + delta for delta in profiled_events(step)]
    assert tuple(timeline) == measured.timeline.live_bytes


CODE = """
import torch
held = torch.ones(1000)               # born before any counting
numpy_like = torch.frombuffer(bytearray(400), dtype=torch.uint8)
layer = torch.nn.Linear(10, 10)
layer(torch.ones(5, 10)).sum().backward()
view = held[10:20]
from torchecho.meter.step import measure
late = torch.ones(100)
def step():
    layer.zero_grad()
    layer(held[:50].view(5, 10)).sum().backward()
m = measure(step, device="cpu")
print(m.base_bytes, m.peak_bytes)
"""


@pytest.mark.parametrize("compiler", [None, "no-such-compiler"], ids=["allocator", "profiler"])
def test_totals_include_what_was_born_before(compiler):
    environment = {**os.environ, **({"CXX": compiler} if compiler else {})}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    base, peak = map(int, done.stdout.split()[-2:])
    parameters = (10 * 10 + 10) * 4
    assert base == 4000 + 400 + 400 + 2 * parameters
    # The old gradients go first; the step then holds its output (5, 10), two scalars and the new gradients at most.
    assert base - parameters < peak <= base + 5 * 10 * 4 + 8


def test_runs_are_counted():
    calls = []
    measure(lambda: calls.append(1), warmup=2, repeats=3, device="cpu")
    assert len(calls) == 5


def test_peak_is_of_the_highest_run():
    sizes = iter([100, 400, 200])
    measured = measure(lambda: torch.empty(next(sizes), dtype=torch.uint8), warmup=0, repeats=3, device="cpu")
    assert measured.peak_bytes - measured.base_bytes == 400


def test_failing_step_stops_the_recording():
    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(fail, warmup=0, device="cpu")
    torch.empty(10)
    assert allocator.events() == []


@pytest.mark.parametrize(
    ("counts", "text"),
    [({"warmup": -1}, "warmup must be 0 or more .*; got -1"), ({"repeats": 0}, "repeats must be 1 or more .*; got 0")],
)
def test_counts_out_of_range_are_refused(counts, text):
    with pytest.raises(MeasureError, match=text):
        measure(lambda: None, device="cpu", **counts)


def test_other_devices_are_refused():
    with pytest.raises(MeasureError, match="cannot measure on meta"):
        measure(lambda: None, device="meta")
