"""Where the costs of ops come from, and where those that are measured go."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import torchecho
from torchecho.cost.table import CostTable, OpCost, read_named, save_table
from torchecho.ir.graph import Op, Phase, TrainingGraph
from torchecho.meter.calibrate import device_name
from torchecho.meter.pricing import price, table_path

CPU = torch.device("cpu")


def train(cost: Path, **options: object) -> None:
    model = torchecho.optimize(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), memory_budget=1.0, cost=cost, **options)
    model(torch.randn(4, 8)).sum().backward()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHECHO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("engine", ["eager", "compile"])
def test_a_program_that_is_named_as_a_table_stays_what_it_was(tmp_path, engine):
    path = tmp_path / "train.py"
    path.write_text("import torch\n")
    with pytest.raises(torchecho.OptionError, match="is no cost table"):
        train(path, engine=engine)
    assert path.read_text() == "import torch\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["cache", "train.py"]


def test_a_table_of_another_device_keeps_its_costs(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"torchecho": "cost-table/2", "device": "H100", "entries": {"a": [1.0, 1]}}))
    before = path.read_text()
    with pytest.raises(torchecho.OptionError, match="was measured on 'H100'"):
        train(path)
    assert path.read_text() == before


def test_what_a_named_table_lacks_is_measured_and_kept_in_the_cache_alone(tmp_path):
    folder = tmp_path / "mine"
    path = folder / "t.json"
    save_table(CostTable(device_name(CPU), None, {"mine": OpCost(9.0, 1)}), path)
    before = path.read_text()
    (folder / "t.json.lock").unlink()
    train(path)
    assert path.read_text() == before
    assert [one.name for one in folder.iterdir()] == ["t.json"]
    kept = read_named(table_path(CPU), device_name(CPU))
    assert kept
    assert "mine" not in kept


@pytest.mark.parametrize("may_run", [True, False])
def test_a_named_table_wins_over_the_one_that_is_kept(tmp_path, may_run):
    path, name = tmp_path / "mine.json", device_name(CPU)
    save_table(CostTable(name, None, {"mm": OpCost(1.0, 1), "add": OpCost(2.0, 2)}), table_path(CPU))
    save_table(CostTable(name, None, {"mm": OpCost(9.0, 3)}), path)
    ops = (Op(word, "t", Phase.FORWARD, (), (), is_view=False, signature=word) for word in ("mm", "add"))
    costs = price(TrainingGraph(tuple(ops), (), ()), pytest.fail, cost=str(path), device=CPU, may_run=may_run)
    assert costs.seconds == (9.0, 2.0)
