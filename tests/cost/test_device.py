import pytest

from torchecho.cost.device import KNOWN_DEVICES, DeviceSpec, known_device, load_spec, save_spec
from torchecho.errors import OptionError


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("a100", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_names_that_drivers_report_are_found(reported, expected):
    assert known_device(reported).name == expected


def test_unknown_name_lists_the_known_and_the_nearest():
    with pytest.raises(OptionError, match=r"'H1000'.*nearest is 'H100'.*RTX 4090"):
        known_device("H1000")


def test_every_known_device_moves_a_float_slower_than_it_adds_one():
    for spec in KNOWN_DEVICES:
        assert spec.bytes_per_second / 4 < spec.flops_per_second < spec.half_flops_per_second


def test_spec_comes_back(tmp_path):
    spec = DeviceSpec("cpu", 1e11, 2e10, 1e-6)
    save_spec(spec, tmp_path / "device.json")
    assert load_spec(tmp_path / "device.json") == spec


@pytest.mark.parametrize("change", ['"flops_per_second": 0', '"flops_per_second": "fast"', '"flops_per_hour": 1'])
def test_spec_with_bad_numbers_is_ignored_with_one_warning(tmp_path, caplog, change):
    path = tmp_path / "device.json"
    save_spec(DeviceSpec("cpu", 1.0, 1.0, 1.0), path)
    path.write_text(path.read_text().replace('"flops_per_second": 1.0', change))
    assert load_spec(path) is None
    assert len(caplog.records) == 1
