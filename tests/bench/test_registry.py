import pytest
import torch

from torchecho.bench import planner
from torchecho.bench.registry import check_device, check_size, select
from torchecho.errors import OptionError


def test_no_name_means_all():
    assert [workload.name for workload in select([])] == ["nmt", "eager", "planner", "rnn"]


def test_names_are_taken_in_their_order():
    assert [workload.name for workload in select(["planner", "nmt"])] == ["planner", "nmt"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nmtt", r"unknown workload 'nmtt', did you mean 'nmt'\? \(there are: nmt, eager, planner, rnn\)"),
        ("transformr", r"unknown workload 'transformr' \(there are: nmt, eager, planner, rnn\)"),
    ],
)
def test_a_workload_that_is_not_there(name, text):
    with pytest.raises(OptionError, match=text):
        select([name])


def test_sizes():
    assert check_size("tiny") == "tiny"
    with pytest.raises(OptionError, match="did you mean 'tiny'"):
        check_size("tinny")


def test_devices():
    assert check_device("cpu", select([])) == "cpu"
    with pytest.raises(OptionError, match="did you mean 'cuda'"):
        check_device("cudaa", [])
    with pytest.raises(OptionError, match=r"workload 'rnn' is not measured on cuda \(those are: nmt, eager\)"):
        check_device("cuda", select(["nmt", "rnn"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there():
    with pytest.raises(OptionError, match="finds no CUDA device"):
        check_device("cuda", select(["nmt"]))


def test_planner_rows(monkeypatch):
    found = {
        "workload": "unet",
        "nodes": 200,
        "planning_seconds": 0.5,
        "memory_bytes": 2048,
        "budget": 0.4,
        "floor": 0.25,
        "peak": 0.375,
        "overhead": 0.1,
        "overhead_bound": 0.05,
        "origin": "",
    }
    missed = found | {"peak": None, "overhead": None}
    monkeypatch.setattr(planner, "run_job", lambda job, arguments, tell: [found, missed])
    first, second = planner.run("tiny", lambda text: None)
    assert (first.size, first.setting, first.nodes) == ("unet, 200 ops", "budget 40%", 200)
    assert first.note == "peak 37.5% of untouched, floor 25.0%, planner used 2.0 KiB"
    assert second.overhead_predicted is None
    assert second.note == "floor 25.0%, planner used 2.0 KiB"
