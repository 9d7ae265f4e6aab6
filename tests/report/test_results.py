import json

import pytest

from torchecho.errors import OptionError
from torchecho.report.results import ResultRow, Results, sweep_faults

NAMES = (
    "workload, size, system, setting, engine, lowering, params, batch, baseline_peak_bytes, predicted_peak_bytes,"
    " peak_bytes, seconds, seconds_median, overhead_predicted, overhead_measured, overhead_bound, planning_seconds,"
    " compile_seconds, nodes, grads_equal, loss"
)


def fixed_names():
    return NAMES.split(", ")


def row(**fields):
    return ResultRow(workload="nmt", size="2/2", system="torchecho", **fields)


def budget(number, budget_bytes, peak_bytes, overhead):
    return row(setting=f"b{number}", budget_bytes=budget_bytes, peak_bytes=peak_bytes, overhead_predicted=overhead)


@pytest.fixture
def results():
    full = row(batch=4, seconds=(1.0, 2.0, 4.0), seconds_median=2.0, peak_bytes=100, base_bytes=30, losses=(3.0, 2.5))
    return Results("0.1", "2.13", "abacus", 2, (full, row(note="unreachable")))


def test_json_both_ways(results):
    assert Results.from_json(results.to_json()) == results


def test_the_fixed_names_are_there_in_their_order(results):
    document = json.loads(results.to_json())
    assert list(document) == ["torchecho", "torch", "device", "threads", "rows"]
    assert list(document["rows"][0])[: len(fixed_names())] == fixed_names()


def test_names_of_another_version_are_dropped(results):
    document = json.loads(results.to_json())
    document["rows"][0]["colour"] = "red"
    assert Results.from_json(json.dumps(document)) == results


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"size": 3}]}', '{"rows": 3}'])
def test_what_is_no_result_is_one_line(text):
    with pytest.raises(OptionError, match="cannot read the results") as caught:
        Results.from_json(text)
    assert "\n" not in str(caught.value)


def test_derived_figures():
    derived = row(batch=4, seconds_median=2.0, peak_bytes=100, base_bytes=30)
    assert derived.above_base_bytes == 70
    assert derived.samples_per_second == 2.0
    assert row().above_base_bytes is None
    assert row(batch=4).samples_per_second is None


def test_a_sweep_that_keeps_its_promises():
    rows = [row(), budget(2, 80, 80, 0.1), budget(1, 100, 95, 0.0), budget(3, 60, 60, 0.1)]
    assert sweep_faults(rows) == []


def test_equal_budgets_are_no_sweep():
    assert sweep_faults([budget(1, 100, 70, 0.2), budget(2, 100, 75, 0.1)]) == []


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([budget(1, 100, 101, 0.0)], "b1: measured 101 B is over the budget"),
        ([budget(1, 100, 70, 0.0), budget(2, 80, 75, 0.0)], "b2: measured peak rises from 70 to 75 B"),
        ([budget(1, 100, 90, 0.2), budget(2, 80, 75, 0.1)], "b2: predicted overhead falls below that of b1"),
    ],
)
def test_a_broken_promise_is_named(rows, part):
    assert sweep_faults(rows) == [part]
