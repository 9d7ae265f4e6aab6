import json
import multiprocessing
import re
from dataclasses import dataclass

import pytest

from torchecho.cost.model import OpCosts, estimate
from torchecho.cost.table import CostTable, OpCost, load_table, read_named, save_table
from torchecho.errors import OptionError
from torchecho.ir.graph import Op, Phase, TrainingGraph


@dataclass(frozen=True)
class Flat:
    def op_seconds(self, op, graph):
        return 9.0

    def op_workspace_bytes(self, op, graph):
        return 99


def graph_of(*signatures: str, is_view: bool = False) -> TrainingGraph:
    ops = (Op(f"o{i}", "t", Phase.FORWARD, (), (), is_view, signature=s) for i, s in enumerate(signatures))
    return TrainingGraph(tuple(ops), (), ())


def test_measured_cost_wins_and_the_rest_falls_back():
    table = CostTable("cpu", Flat(), {"mm": OpCost(0.5, 10), "odd": None})
    costs = estimate(graph_of("mm", "odd", "new", ""), table)
    assert costs == OpCosts((0.5, 9.0, 9.0, 9.0), (10, 99, 99, 99))


def test_view_costs_nothing():
    assert estimate(graph_of("new", is_view=True), CostTable("cpu", Flat())) == OpCosts((0.0,), (0,))


def test_each_signature_is_to_be_measured_once():
    table = CostTable("cpu", Flat(), {"mm": OpCost(0.5, 10), "odd": None})
    assert table.unmeasured(graph_of("add", "mm", "add", "odd", "", "mul")) == (0, 5)


def test_table_comes_back(tmp_path):
    table = CostTable("cpu", Flat(), {"mm": OpCost(0.1 + 0.2, 10), "odd": None})
    assert save_table(table, tmp_path / "t.json") == table
    assert load_table(tmp_path / "t.json", "cpu", Flat()) == table


def test_save_keeps_what_others_saved_and_replaces_what_is_new(tmp_path):
    path = tmp_path / "t.json"
    save_table(CostTable("cpu", Flat(), {"a": OpCost(1.0, 1), "b": OpCost(1.0, 1)}), path)
    merged = save_table(CostTable("cpu", Flat(), {"b": OpCost(2.0, 2)}), path)
    assert merged.entries == {"a": OpCost(1.0, 1), "b": OpCost(2.0, 2)}


def save_ten(path, first):
    for n in range(first, first + 10):
        save_table(CostTable("cpu", Flat(), {f"op{n}": OpCost(float(n), n)}), path)


def test_processes_that_save_at_once_all_contribute(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=save_ten, args=(tmp_path / "t.json", first)) for first in (0, 10)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    saved = load_table(tmp_path / "t.json", "cpu", Flat()).entries
    assert saved == {f"op{n}": OpCost(float(n), n) for n in range(20)}


@pytest.mark.parametrize(
    "entries",
    [None, [], {"a": 1}, {"a": []}, {"a": [1]}, {"a": [1, 2, 3]}, {"a": ["x", 1]}, {"a": [-1, 1]}, {"a": [1, -1]}],
)
def test_damaged_entries_are_ignored_with_one_warning(tmp_path, caplog, entries):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"torchecho": "cost-table/1", "device": "cpu", "entries": entries}))
    assert load_table(path, "cpu", Flat()).entries == {}
    assert len(caplog.records) == 1


def test_costs_of_another_device_are_ignored_with_one_warning(tmp_path, caplog):
    save_table(CostTable("H100", Flat(), {"a": OpCost(1.0, 1)}), tmp_path / "t.json")
    assert load_table(tmp_path / "t.json", "cpu", Flat()).entries == {}
    assert "H100" in caplog.text
    assert len(caplog.records) == 1


def test_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.touch()
    table = CostTable("cpu", Flat(), {"a": OpCost(1.0, 1)})
    assert save_table(table, blocked / "t.json") is table
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (None, "there is no file"),
        ("import torch\n", "is no cost table, it cannot be read as JSON"),
        ("[]", "is no cost table, its kind is None, not 'cost-table/2'"),
        ('{"torchecho": "cost-table/1"}', "its kind is 'cost-table/1'"),
        ('{"torchecho": "cost-table/2", "device": "H100", "entries": {}}', "was measured on 'H100', not on 'cpu'"),
        ('{"torchecho": "cost-table/2", "device": "cpu", "entries": {"a": [-1, 1]}}', "is damaged"),
    ],
)
def test_a_named_file_that_is_no_table_of_the_device_is_refused_and_stays(tmp_path, text, hint):
    path = tmp_path / "train.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match=re.escape(hint)) as caught:
        read_named(path, "cpu")
    assert "leave cost out" in str(caught.value)
    assert [one.read_text() for one in tmp_path.iterdir()] == ([] if text is None else [text])


def test_a_named_table_is_read(tmp_path):
    table = CostTable("cpu", Flat(), {"mm": OpCost(0.5, 10), "odd": None})
    save_table(table, tmp_path / "t.json")
    assert read_named(tmp_path / "t.json", "cpu") == table.entries
