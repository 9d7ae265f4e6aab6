import json
import math

import pytest
import torch

from torchecho.bench import calls, eager, eager_jobs
from torchecho.bench.eager_models import Chain, make_language_model
from torchecho.bench.training import Training
from torchecho.errors import BudgetError

WORDS = {"steps": 4, "batch": 4, "hidden": 16, "vocabulary": 20}
LENGTHS = {
    "longest": {"batch": 64, "hidden": 8, "source_steps": 4, "target_steps": 4},
    "shortest": 2,
    "batches": 3,
    "factor": 1.0,
}
UNTOUCHED = {"system": "eager", "setting": "untouched"}


def quiet(text):
    del text


def test_the_language_model_is_paired_with_plain_eager_and_tells_its_plan():
    system = {"system": "torchecho", "setting": "floor", "options": {"engine": "eager", "max_slowdown": 100.0}}
    row = eager_jobs.language_model(quiet, size=WORDS, system=system, reference=UNTOUCHED, pairs=2)
    assert row["grads_equal"] is True
    assert row["base_bytes"] < row["peak_bytes"] <= row["baseline_peak_bytes"]
    assert row["compile_seconds"] is None
    assert row["first_seconds"] > 0
    assert "ops run again; the peak is at" in row["note"]


def test_converted_layers_are_compared_with_their_own_bits():
    system = {
        "system": "torchecho",
        "setting": "floor",
        "options": {"engine": "eager", "max_slowdown": 100.0},
        "converted": True,
    }
    row = eager_jobs.language_model(quiet, size=WORDS, system=system, reference=UNTOUCHED, pairs=1)
    assert row["grads_equal"] is True
    training = make_language_model(**WORDS, seed=0)
    twin = training.converted().model
    assert type(twin.layers).__module__ == "torchecho.nn.lstm"
    assert type(training.model.layers) is torch.nn.LSTM
    assert all(a is b for a, b in zip(training.model.parameters(), twin.parameters(), strict=True))


def test_the_language_model_predicts_the_next_word():
    training = make_language_model(**WORDS, seed=0)
    words, next_words = training.batch
    assert words.shape == (4, 4)
    assert torch.equal(words[1:], next_words[:-1])
    assert float(training.model(words, next_words).detach()) == pytest.approx(math.log(20), rel=0.1)


def test_random_lengths_stay_inside_the_asked_range_and_are_all_counted():
    pytest.importorskip("django")
    row = eager_jobs.lengths(quiet, extent=LENGTHS)
    figures = row["figures"]
    assert figures["batches"] == 3 == len(row["seconds"])
    assert row["base_bytes"] < row["peak_bytes"]
    assert row["budget_bytes"] == row["baseline_peak_bytes"]
    assert figures["batches_over_budget"] == 0 == (row["peak_bytes"] > row["budget_bytes"])
    assert figures["plans"] >= 1
    for kind in ("added", "stall", "noise"):
        assert figures[f"{kind}_seconds_median"] <= figures[f"{kind}_seconds_p95"] <= figures[f"{kind}_seconds_max"]
    assert json.loads(json.dumps(row)) == row


def test_sizes_are_the_longest_and_then_repeatable_draws():
    first, *drawn = eager_jobs._sizes({**LENGTHS, "batches": 50})
    assert first == (4, 4)
    assert drawn == eager_jobs._sizes({**LENGTHS, "batches": 50})[1:]
    assert {number for size in drawn for number in size} == {2, 3, 4}


def test_batches_over_the_budget_are_counted_after_the_first():
    steps = [
        eager_jobs._Step((2, 2), 3.0, 1.0, (2.75, 2.5), 500, 3),
        eager_jobs._Step((3, 2), 2.5, 1.0, (0.75, 1.25), 700, 40),
    ]
    row = eager_jobs._summary((9.0, 900), steps, budget=600, untouched_bytes=1200, base_bytes=100)
    assert row["figures"]["batches_over_budget"] == 1
    assert row["peak_bytes"] == 700
    assert row["figures"]["added_seconds_max"] == 2.0
    assert row["figures"]["stall_seconds_max"] == 1.5
    assert row["figures"]["noise_seconds_max"] == 0.5
    assert row["first_seconds"] == 9.0
    assert "1 of 2 batches over the budget" in row["note"]
    assert "at 3/2 steps" in row["note"]
    assert "took a core from it 40 times, 3 from half of them" in row["note"]


def test_calls_are_measured_in_every_way():
    rows = calls.cost_of_calls(num_ops=40, pairs=1)
    assert [row["system"] for row in rows] == ["eager"] + ["torchecho"] * 6
    assert {row["nodes"] for row in rows} == {41}  # 40 of the chain and the sum
    for row in rows:
        assert row["figures"]["seconds_per_call"] == pytest.approx(row["seconds_median"] / 41)


def test_the_policies_recompute_what_they_say():
    model = Chain(num_ops=40)
    training = Training(model, torch.optim.SGD(model.parameters()), (torch.rand(16, 16),))
    recording = calls._record(training)
    assert calls._follow(training, calls._policy(recording, None)) == 0
    some = calls._policy(recording, 10)
    assert 0 < calls._follow(training, some) <= 5
    calls._learn(training, some)
    assert some.outline.calls
    assert calls._follow_quietly(training, some) == calls._follow(training, some)
    assert all(p.grad is None for p in model.parameters())


def test_rows_of_a_run(monkeypatch):
    asked = []

    def run_job(job, arguments, tell):
        asked.append((job, arguments))
        tell("busy")
        if job == "calls":
            return [{"system": "eager", "setting": "untouched", "nodes": 4}]
        if "memory_budget" in arguments.get("system", {}).get("options", {}):
            raise BudgetError("the floor is 4 B")
        return {"system": "torchecho", "setting": "found", "peak_bytes": 300, "seconds": [1.0]}

    monkeypatch.setattr(eager, "run_job", run_job)
    told = []
    rows = eager.run("tiny", told.append)
    assert [job for job, _ in asked] == ["configuration"] * 3 + ["language_model"] * 2 + ["lengths", "calls"]
    assert [row.system for row in rows] == [
        "eager",
        "torchecho",
        "torchecho",
        "eager",
        "torchecho",
        "torchecho",
        "eager",
    ]
    assert (rows[1].note, rows[1].peak_bytes) == ("the floor is 4 B", None)
    assert asked[1][1]["system"]["options"] == {"memory_budget": 200, "engine": "eager"}  # 300 B divided by 1.5
    assert [arguments["system"]["converted"] for _, arguments in asked[1:3]] == [False, True]
    assert asked[4][1]["reference"]["system"] == "eager"
    assert {row.workload for row in rows} == {"eager"}
    assert any(text.endswith("untouched: busy") for text in told)


def test_the_full_extent_is_the_promised_one():
    full = eager.EXTENTS["full"]
    assert {str(steps): factors for steps, factors in full.translator} == {
        "48/48 steps, B=64, H=256": (2.8,),
        "96/96 steps, B=64, H=256": (4.5,),
    }
    assert [words.vocabulary for words, _ in full.words] == [200, 20_000]
    assert (full.lengths.shortest, full.lengths.longest.source_steps, full.lengths.batches) == (10, 96, 200)
    assert full.ops == 4000
    assert full.pairs >= 9
