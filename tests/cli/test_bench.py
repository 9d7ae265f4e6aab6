import json

import pytest

from torchecho.bench import registry
from torchecho.bench.registry import Workload
from torchecho.cli.main import main
from torchecho.errors import BudgetError
from torchecho.report.results import ResultRow, Results


@pytest.fixture
def runs():
    return []


@pytest.fixture
def workload(monkeypatch, runs):
    def run(size, tell, device):
        runs.append(size)
        tell("counting [beads]")
        return [
            ResultRow(workload="abacus", size=size, system="eager", peak_bytes=400, batch=2),
            ResultRow(workload="abacus", size=size, system="torchecho", setting="b", peak_bytes=200, budget_bytes=100),
        ]

    monkeypatch.setattr(registry, "WORKLOADS", (Workload("abacus", run),))


def test_rows_go_to_the_screen_json_and_markdown(workload, tmp_path, capsys):
    path, markdown = tmp_path / "b.json", tmp_path / "b.md"
    assert main(["bench", "abacus", "--size", "tiny", "--json", str(path), "--markdown", str(markdown)]) == 0
    out = capsys.readouterr().out
    assert "counting [beads]" in out
    assert "2.00x" in out
    assert "abacus, tiny: b: measured 200 B is over the budget" in out
    results = Results.from_json(path.read_text())
    assert [row.system for row in results.rows] == ["eager", "torchecho"]
    assert results.threads >= 1
    assert markdown.read_text().startswith("`torchecho bench abacus --size tiny --json FILE`")


def test_json_on_stdout_is_alone_there(workload, capsys):
    assert main(["bench", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["rows"]) == 2
    assert "counting" in captured.err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["abacuss"], "unknown workload 'abacuss', did you mean 'abacus'?"),
        (["--size", "huge"], "size must be one of full, tiny"),
        (["--markdown", "/nowhere/b.md"], "--markdown: cannot write '/nowhere/b.md'"),
        (["--json", "/"], "--json: cannot write '/'"),
    ],
)
def test_wrong_usage_is_one_line(workload, runs, args, text, capsys):
    assert main(["bench", *args]) == 2
    assert runs == []
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert text in error[0]


@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_tables_are_printed_before_files_are_written(workload, option, monkeypatch, tmp_path, capsys):
    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", fails)
    assert main(["bench", option, str(tmp_path / "b")]) == 2
    captured = capsys.readouterr()
    assert "2.00x" in captured.out
    assert captured.err.endswith(": No space left on device\n")


def test_a_budget_that_cannot_be_met_has_its_own_code(monkeypatch, capsys):
    def run(size, tell, device):
        raise BudgetError("the floor is 3 MiB")

    monkeypatch.setattr(registry, "WORKLOADS", (Workload("abacus", run),))
    assert main(["bench"]) == 1
    assert capsys.readouterr().err == "torchecho: error: the floor is 3 MiB\n"


def test_help_has_an_example(capsys):
    assert main(["bench", "--help"]) == 0
    assert "Example: torchecho bench nmt" in capsys.readouterr().out
