import pytest

from torchecho.bench import demo
from torchecho.bench.demo import DemoSetup, batch_between, guess_batch, run_demo
from torchecho.errors import BudgetError, OptionError
from torchecho.report.results import ResultRow

# Bytes of a pretended model: 1600 fixed (100 parameters, four times, 4 bytes), and some for each sample.
FIXED, EAGER, PLANNED, FLOOR = 1600, 100, 40, 20


def fields(batch, per_sample, **more):
    peak = FIXED + per_sample * batch
    return {"batch": batch, "params": 100, "peak_bytes": peak, "losses": [3.0, 2.0], "seconds_median": 1.0, **more}


class Jobs:
    def __init__(self, largest=10**9):
        self.asked = []
        self.largest = largest

    def __call__(self, job, arguments, tell):
        self.asked.append((job, arguments))
        batch = arguments.get("batch")
        if job == "floor_bytes":
            return FIXED + FLOOR * batch
        if job == "largest_eager_batch":
            return fields((arguments["budget_bytes"] - FIXED) // EAGER, EAGER)
        if arguments["options"] is None:
            return fields(batch, EAGER)
        if batch > self.largest:
            raise BudgetError("too large")
        return fields(batch, PLANNED, floor_bytes=FIXED + FLOOR * batch)


@pytest.fixture
def jobs(monkeypatch):
    made = Jobs()
    monkeypatch.setattr(demo, "run_job", made)
    return made


def quiet(text):
    del text


def test_a_fraction_is_of_the_untouched_peak():
    assert DemoSetup(memory_budget="0.5").budget_bytes(1000) == 500
    assert DemoSetup(memory_budget="2KiB").budget_bytes(1000) == 2048


@pytest.mark.parametrize("text", ["auto", "lots", "0", "1.5"])
def test_a_budget_that_cannot_be_used_is_told_before_training(text, jobs):
    with pytest.raises(OptionError):
        run_demo(DemoSetup(memory_budget=text), quiet)
    assert jobs.asked == []


def test_the_demo_compares_and_enlarges(jobs):
    shown = run_demo(DemoSetup(memory_budget="0.5", batch=64), quiet)
    assert shown.budget_bytes == (FIXED + 64 * EAGER) // 2
    assert [options for _, arguments in jobs.asked if (options := arguments.get("options")) is not None] == [
        {"max_slowdown": 0},
        *[{"memory_budget": 4000}] * 3,
    ]
    assert shown.planned.grads_equal is True
    assert shown.largest_untouched.batch == 24  # (4000 - 1600) / 100
    assert shown.largest_planned.batch == 120  # (4000 - 1600) / 20
    assert shown.roomy_planned.batch == 96  # four fifths of it
    assert len(shown.rows) == 6


def test_a_batch_that_does_not_fit_is_followed_by_smaller_ones(jobs):
    jobs.largest = 115
    assert run_demo(DemoSetup(memory_budget="0.5", batch=64), quiet).largest_planned.batch == 114  # 120, 117, 114


def test_the_trained_batch_is_the_last_resort(jobs):
    jobs.largest = 64
    shown = run_demo(DemoSetup(memory_budget="0.5", batch=64), quiet)
    assert shown.largest_planned.batch == 64
    assert shown.roomy_planned is None


def test_guesses():
    planned = ResultRow(workload="nmt", size="", system="torchecho", params=100, batch=10, floor_bytes=FIXED + 200)
    assert guess_batch(planned, FIXED + 1000) == 50
    assert guess_batch(planned, FIXED) == 11  # never the same batch again: the line needs two points
    assert batch_between((10, 1800), (50, 2600), 2300) == 35
    assert batch_between((10, 1800), (50, 2600), 1000) == 10
