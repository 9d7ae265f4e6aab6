import dataclasses
import io

import pytest
from rich.console import Console

from torchecho.report.cells import cells_of
from torchecho.report.markdown import results_markdown
from torchecho.report.results import ResultRow, Results
from torchecho.report.tables import results_report


def text_of(*parts, width=120):
    console = Console(file=io.StringIO(), width=width)
    for part in parts:
        console.print(part)
    return console.file.getvalue()


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
