"""Two processes that train one model: the losses of plain Python, and the same plan on both ranks."""

import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from torchecho.cost.model import OpCosts
from torchecho.engine.ranks import same_on_every_rank
from torchecho.ir.graph import TrainingGraph

TRAINING = """
import json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1))]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.Adam(model.parameters())
torch.manual_seed(rank)
for _ in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(256, 64)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
print([p.double().sum().item().hex() for p in model.parameters()])
if len(sys.argv) > 2:
    import torchecho
    with open(sys.argv[2] + str(rank), "w") as file:
        json.dump([[plan.graph_hash, plan.schedule.steps, plan.num_recomputed] for plan in torchecho.plans()], file)
dist.destroy_process_group()
"""


def start(folder, rank, *command):
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_every_rank_plans_alike_and_trains_as_it_would(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    options = ("--strict", "--memory-budget", "0.8", "--json", "run.json")
    ours_command = ("-m", "torchecho", "run", *options, "train.py", str(tmp_path / "ours"), "plan")
    plain = [start(tmp_path, rank, "train.py", str(tmp_path / "plain")) for rank in (0, 1)]
    ours = [start(tmp_path, rank, *ours_command) for rank in (0, 1)]
    printed = [process.communicate(timeout=120) for process in (*plain, *ours)]
    assert [process.returncode for process in (*plain, *ours)] == [0] * 4, printed
    assert [out for out, _ in printed[2:]] == [out for out, _ in printed[:2]]
    plans = [json.loads((tmp_path / f"plan{rank}").read_text()) for rank in (0, 1)]
    assert plans[0] == plans[1]
    assert plans[0][0][2] > 0
    assert "torchecho: 4 training steps" in printed[2][1]
    assert "training steps" not in printed[3][1]
    [plan] = json.loads((tmp_path / "run.json").read_text())["plans"]
    assert plan["name"] == "DistributedDataParallel"
    # Its second step makes new buckets in place of those from before the first plan.
    assert plan["measured_peak_bytes"] <= plan["budget_bytes"]


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'alone'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


GRAPH = TrainingGraph((), (), ())
COSTS = OpCosts((0.1, 1 / 3), (8, 0))


def test_one_process_keeps_its_costs():
    assert same_on_every_rank(GRAPH, COSTS) is COSTS


def test_a_group_of_one_keeps_its_costs(alone):
    assert same_on_every_rank(GRAPH, COSTS) is COSTS


def test_the_first_to_ask_decides(alone, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert same_on_every_rank(GRAPH, COSTS) == COSTS
    assert same_on_every_rank(GRAPH, OpCosts((7.0, 8.0), (1, 2))) == COSTS
