import dataclasses

import pytest
import torch

from torchecho.meter import calibrate


@pytest.fixture
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "_BUDGET_SECONDS", 0.0)
    monkeypatch.setenv("TORCHECHO_CACHE", str(tmp_path))


def test_numbers_are_positive_and_the_device_is_named(quick):
    spec = calibrate.calibrate("cpu")
    assert min(spec.flops_per_second, spec.bytes_per_second, spec.launch_seconds) > 0
    assert spec.name == calibrate.device_name(torch.device("cpu")) != ""


def test_device_is_calibrated_once(quick, monkeypatch):
    first = calibrate.calibrated_device("cpu")
    monkeypatch.setattr(calibrate, "calibrate", lambda device: pytest.fail("calibrated again"))
    assert calibrate.calibrated_device("cpu") == first


def test_another_number_of_threads_is_another_device(quick, monkeypatch):
    first = calibrate.calibrated_device("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    other = dataclasses.replace(first, flops_per_second=1.0)
    monkeypatch.setattr(calibrate, "calibrate", lambda device: other)
    assert calibrate.calibrated_device("cpu") == other


def test_damaged_file_is_measured_again(quick, tmp_path, caplog):
    calibrate.calibrated_device("cpu")
    (path,) = tmp_path.glob("device-*.json")
    path.write_text("{")
    assert calibrate.calibrated_device("cpu").flops_per_second > 0
    assert len(caplog.records) == 1
