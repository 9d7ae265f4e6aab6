import dataclasses
import json

import pytest

from torchecho.ir.schedule import Schedule
from torchecho.planner.plan import Plan, Row
from torchecho.report.run import RunResult, run_summary


@pytest.fixture
def plan():
    rows = tuple(Row(f"aten.op{n}", f"layer{n}", f"model.py:{n}", n, 1024 * n, 0.001 * n) for n in range(7, 0, -1))
    return Plan(
        graph_hash="h",
        schedule=Schedule((0,), 1),
        budget_bytes=4096,
        max_slowdown=None,
        baseline_peak_bytes=8192,
        predicted_peak_bytes=4096,
        floor_bytes=2048,
        overhead=0.125,
        overhead_bound=0.0625,
        baseline_seconds=1.0,
        stash_bytes=1024,
        baseline_stash_bytes=2048,
        num_recomputed=3,
        num_stashed=5,
        num_ops=9,
        planning_seconds=0.5,
        peak_step="aten.mm",
        frontier=((8192, 0.0),),
        stashed=rows,
        recomputed=rows,
        at_peak=rows[:1],
        floor_parts=rows[:1],
        kept_reasons=(),
        name="Net",
        measured_peak_bytes=4097,
        notes=("why",),
    )


@pytest.fixture
def result(plan):
    return RunResult(
        torchecho="1",
        torch="2",
        device="abacus",
        threads=2,
        program=("train.py", "--lr", "1"),
        exit_code=0,
        is_interrupted=False,
        error=None,
        steps=3,
        plans=(plan,),
    )


def test_summary(result):
    assert run_summary(result) == [
        "torchecho: 3 training steps",
        "  Net: peak 4.0 KiB predicted, 4.0 KiB measured; untouched 8.0 KiB (2.00 times less)",
        "    budget 4.0 KiB, floor 2.0 KiB",
        "    step time +12.5 % predicted; 3 of 9 ops run again",
        "       7.0 KiB    7.0 ms      7 x aten.op7                               layer7 model.py:7",
        "       6.0 KiB    6.0 ms      6 x aten.op6                               layer6 model.py:6",
        "       5.0 KiB    5.0 ms      5 x aten.op5                               layer5 model.py:5",
        "       4.0 KiB    4.0 ms      4 x aten.op4                               layer4 model.py:4",
        "       3.0 KiB    3.0 ms      3 x aten.op3                               layer3 model.py:3",
        "       3.0 KiB    3.0 ms  in 2 more rows",
        "    note: why",
    ]


def test_without_a_budget_and_a_measurement(result, plan):
    plain = dataclasses.replace(plan, budget_bytes=None, measured_peak_bytes=None, recomputed=(), notes=())
    assert run_summary(dataclasses.replace(result, plans=(plain,), steps=1)) == [
        "torchecho: 1 training step",
        "  Net: peak 4.0 KiB predicted, not measured; untouched 8.0 KiB (2.00 times less)",
        "    step time +12.5 % predicted; 3 of 9 ops run again",
    ]


def test_later_plans_of_a_module_take_a_line_each(result, plan):
    lines = run_summary(dataclasses.replace(result, plans=(plan,) * 20))
    assert sum(line.startswith("  Net, other steps: peak") for line in lines) == 11
    piece = dataclasses.replace(plan, lowering="inductor")
    assert run_summary(dataclasses.replace(result, plans=(piece, piece)))[-1].startswith("  Net, another piece: peak")
    assert lines[-1] == "  and 8 more plans (--json has them all)"


def test_nothing_planned(result):
    [line] = run_summary(dataclasses.replace(result, plans=()))
    assert line.startswith("torchecho: 3 training steps; nothing was planned: ")
    assert line.endswith(", or a warning above says why")
    [line] = run_summary(dataclasses.replace(result, plans=(), steps=0))
    assert line.endswith("nothing was planned: no backward followed the forward of a module")
    [line] = run_summary(dataclasses.replace(result, plans=(), exit_code=130, is_interrupted=True))
    assert line == "torchecho: 3 training steps; interrupted before a plan was made"


def test_a_program_that_failed_at_once_has_no_summary(result):
    assert run_summary(dataclasses.replace(result, plans=(), steps=0, exit_code=1)) == []


def test_json(result, plan):
    data = json.loads(json.dumps(result.to_dict()))
    assert data["program"] == ["train.py", "--lr", "1"]
    assert (data["torchecho"], data["torch"], data["device"], data["threads"]) == ("1", "2", "abacus", 2)
    assert (data["exit_code"], data["error"], data["steps"]) == (0, None, 3)
    assert dataclasses.replace(result, error="no room").to_dict()["error"] == "no room"
    assert data["plans"] == [
        {
            "name": "Net",
            "lowering": "",
            "budget_bytes": 4096,
            "max_slowdown": None,
            "baseline_peak_bytes": 8192,
            "predicted_peak_bytes": 4096,
            "measured_peak_bytes": 4097,
            "floor_bytes": 2048,
            "overhead_predicted": 0.125,
            "num_recomputed": 3,
            "num_ops": 9,
            "planning_seconds": 0.5,
            "notes": ["why"],
        }
    ]
