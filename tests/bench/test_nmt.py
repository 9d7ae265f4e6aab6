import pytest

from torchecho.bench import nmt
from torchecho.bench.example import load_example, read_pairs
from torchecho.bench.processes import run_job
from torchecho.errors import BudgetError, OptionError

pytest.importorskip("django")

TINY = {"batch": 64, "hidden": 8, "source_steps": 2, "target_steps": 2}


def quiet(text):
    del text


def test_a_configuration_is_compared_with_its_reference():
    system = {"system": "torchecho", "setting": "", "options": {"memory_budget": 0.9, "lowering": "eager"}}
    reference = {"system": "torchecho", "setting": "", "options": {"max_slowdown": 0, "lowering": "eager"}}
    row = run_job("configuration", {"size": TINY, "system": system, "reference": reference, "pairs": 2}, quiet)
    assert row["grads_equal"] is True
    assert row["note"] == ""
    assert row["base_bytes"] < row["peak_bytes"] <= row["budget_bytes"]
    # Whether the reference's peak is higher is for the clock to say: at this size some recomputation saves time.
    assert row["base_bytes"] < row["baseline_peak_bytes"]
    assert len(row["seconds"]) == 2
    assert row["batch"] == 64


def test_the_eager_row_has_no_compile():
    row = run_job("configuration", {"size": TINY, "system": {"system": "eager", "setting": ""}, "pairs": 3}, quiet)
    assert row["compile_seconds"] is None
    assert len(row["seconds"]) == 3
    assert "predicted_peak_bytes" not in row


def test_a_sweep_goes_from_the_untouched_peak_to_the_floor():
    reference, *rows = run_job("sweep", {"size": TINY, "budgets": 2, "fractions": [1.0]}, quiet)
    first, last, rival = rows
    assert first["budget_bytes"] >= reference["predicted_peak_bytes"]
    assert last["budget_bytes"] == reference["floor_bytes"]
    assert last["peak_bytes"] <= last["budget_bytes"]
    assert first["grads_equal"] and last["grads_equal"]  # noqa: PT018 - both or neither
    assert (rival["system"], rival["setting"]) == ("memory_budget", "1")


def test_rows_of_a_run(monkeypatch):
    asked = []

    def run_job(job, arguments, tell):
        asked.append((job, arguments))
        tell("busy")
        if job == "sweep":
            return [{"system": "torchecho", "setting": "budget 1 of 1", "peak_bytes": 5}]
        if "memory_budget" in arguments["system"].get("options", {}):
            raise BudgetError("the floor is 4 B")
        return {"peak_bytes": 300, "seconds": [1.0]}

    monkeypatch.setattr(nmt, "run_job", run_job)
    told = []
    rows = nmt.run("tiny", told.append)
    assert [row.system for row in rows] == [
        "eager", "torchecho", "torchecho", "compile", "memory_budget", "torchecho",
    ]  # fmt: skip
    assert rows[2].note == "the floor is 4 B"
    assert rows[2].peak_bytes is None
    budget = asked[2][1]["system"]["options"]["memory_budget"]
    assert budget == 200  # 300 B of eager PyTorch, divided by 1.5
    assert [row.lowering for row in rows[:4]] == [None, "eager", "eager", "aot_eager"]
    assert asked[3][1]["reference"]["system"] == "stash_all"
    assert "nmt: sweep: busy" in told


def test_the_full_extent_is_the_promised_one():
    full = nmt.EXTENTS["full"]
    assert str(full.steps) == "48/48 steps, B=64, H=256"
    assert full.factors == (2.5, 4.0)
    assert full.sweep_budgets == 20
    assert full.pairs >= 9


def test_text_that_is_missing_is_one_line(monkeypatch, tmp_path):
    example = load_example()
    with pytest.raises(OptionError, match="cannot be read"):
        read_pairs(example, "vi", str(tmp_path / "none.tsv"))
    monkeypatch.setattr(example.corpus, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"Django.*not installed: pip install Django") as caught:
        read_pairs(example, "vi", None)
    assert "\n" not in str(caught.value)
