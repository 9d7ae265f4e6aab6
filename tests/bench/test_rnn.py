import pytest

from torchecho.bench import rnn
from torchecho.bench.rnn_jobs import rnn_compiled, rnn_layers

TINY = {"T": 6, "B": 3, "H": 8, "layers": 2, "stashes": ["gates", "lean"]}


def quiet(text):
    del text


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("layer", ["lstm", "gru", "packed lstm", "projected lstm", "normalised lstm", "bfloat16 gru"])
def test_layers_are_measured_beside_those_of_torch(layer):
    theirs, gates, lean = rnn_layers(quiet, stack={**TINY, "layer": layer}, pairs=2)
    assert [row["setting"] for row in (theirs, gates, lean)] == ["torch.nn", "gates", "lean"]
    assert "speedup" not in theirs["figures"]
    assert len(lean["seconds"]) == 2
    assert lean["figures"]["stash_bytes"] < gates["figures"]["stash_bytes"]
    for row in (theirs, gates, lean):
        assert row["peak_bytes"] >= row["figures"]["stash_bytes"] > 0
        # of two layers of a few steps, in which each result is rounded
        assert 0 < row["figures"]["error"] < (2**-4 if layer.startswith("bfloat16") else 1e-4)


def test_a_compiled_model_is_measured_beside_its_eager_one():
    rows = rnn_compiled(quiet, T=3, B=4, H=8, pairs=1)
    assert [row["setting"] for row in rows] == ["max_slowdown=0", "floor"]
    assert all(row["figures"]["speedup"] > 0 and row["compile_seconds"] > 0 for row in rows)


def test_rows_of_a_run(monkeypatch):
    asked = []

    def run_job(job, arguments, tell):
        asked.append((job, arguments))
        return [{"system": "torchecho", "setting": "lean", "peak_bytes": 5, "figures": {"speedup": 2.0}}]

    monkeypatch.setattr(rnn, "run_job", run_job)
    rows = rnn.run("tiny", quiet)
    assert [job for job, _ in asked] == ["rnn_layers", "rnn_layers", "rnn_compiled"]
    assert rows[0].size == "lstm, T=4, B=2, H=8, layers=2"
    assert rows[0].figures == {"T": 4, "B": 2, "H": 8, "layers": 2, "speedup": 2.0}


def test_the_full_extent_is_the_promised_one():
    layers = [stack.layer for stack in rnn.EXTENTS["full"].stacks]
    assert {name: layers.count(name) for name in dict.fromkeys(layers)} == {
        "lstm": 6, "gru": 5, "packed lstm": 5, "projected lstm": 5, "normalised lstm": 5, "rnn": 5,
        "bfloat16 lstm": 5, "bfloat16 gru": 5, "bfloat16 rnn": 5,
    }  # fmt: skip
    assert rnn.EXTENTS["full"].compiled[0] == 100
