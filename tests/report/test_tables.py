import dataclasses
import io

import pytest
from rich.console import Console

from torchecho.ir.schedule import Schedule
from torchecho.planner.plan import Plan, Row
from torchecho.report.cells import cells_of
from torchecho.report.markdown import results_markdown
from torchecho.report.results import ResultRow, Results
from torchecho.report.tables import plan_report, results_report


def text_of(*parts, width=120):
    console = Console(file=io.StringIO(), width=width)
    for part in parts:
        console.print(part)
    return console.file.getvalue()


@pytest.fixture
def plan():
    rows = tuple(Row(f"aten.op{n}", f"layer{n}", f"model.py:{n}", n, 1024 * n, 0.001 * n) for n in range(20, 0, -1))
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
        peak_step="aten.mm (backward, model.py:7)",
        frontier=((8192, 0.0),),
        stashed=rows,
        recomputed=rows[:2],
        at_peak=rows[:1],
        floor_parts=rows[:1],
        kept_reasons=(("draws random numbers [x]", 2),),
        measured_peak_bytes=4096,
    )


@pytest.fixture
def rows():
    shared = {"workload": "nmt", "size": "2/2 steps", "batch": 4}
    return [
        ResultRow(**shared, system="eager", peak_bytes=4 << 20, base_bytes=1 << 20, seconds_median=0.5, loss=2.0),
        ResultRow(
            **shared,
            system="torchecho",
            setting="[b] | c",
            lowering="eager",
            peak_bytes=2 << 20,
            base_bytes=1 << 20,
            overhead_measured=0.125,
            grads_equal=False,
            note="differs",
        ),
    ]


def test_a_plan_shows_what_explain_says(plan):
    text = text_of(plan_report(plan))
    explained = plan.explain()
    for line in explained.splitlines()[:4]:
        assert " ".join(line.split()) in " ".join(text.split())
    assert "stashed for the backward: 210.0 KiB" in text  # 1 + ... + 20 KiB
    assert "recomputed in the backward: 39.0 KiB, 39.0 ms" in text
    assert "draws random numbers [x] (2)" in text


def test_rows_past_the_limit_are_added_up(plan):
    text = text_of(plan_report(plan, max_rows=12))
    assert "in 8 more rows" in text
    assert "36.0 KiB" in text  # 1 + ... + 8 KiB
    assert "layer8 " not in text


def test_results_compare_with_eager(rows):
    text = text_of(*results_report(rows))
    assert "nmt, 2/2 steps" in text
    assert "2.00x" in text
    assert "+12.5 %" in text
    assert "NO" in text
    assert "torchecho [b] | c: differs" in text


def test_columns_without_content_are_left_out(rows):
    columns, texts = cells_of(rows, details=True)
    headings = [column.heading for column in columns]
    assert "predicted" not in headings
    assert all(len(text) == len(headings) for text in texts)


def test_batches_are_told_where_they_differ(rows):
    headings = [column.heading for column in cells_of(rows, details=False)[0]]
    assert "batch" not in headings
    rows[1] = dataclasses.replace(rows[1], batch=8)
    assert "batch" in [column.heading for column in cells_of(rows, details=False)[0]]


def test_markdown_has_the_command_the_machine_and_even_rows(rows):
    text = results_markdown(Results("0.1", "2.13", "abacus", 2, tuple(rows)), "torchecho bench nmt")
    assert text.startswith("`torchecho bench nmt`\n")
    assert "abacus, 2 threads, torch 2.13" in text
    lines = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert "- torchecho [b] | c: differs" in text
