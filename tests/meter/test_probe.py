import threading

import pytest
import torch

from torchecho.meter.probe import PeakProbe, probe_available, resolve_device


def test_probe_sees_the_peak_above_its_start():
    held = torch.empty(1000)
    probe = PeakProbe("cpu")
    probe.start()
    torch.empty(100)
    kept = torch.empty(50)
    assert probe.stop() == 400
    assert held.numel() + kept.numel() == 1050


def test_inner_probe_leaves_the_outer_its_earlier_and_later_peaks():
    with PeakProbe("cpu") as outer:
        torch.empty(1000)
        with PeakProbe("cpu") as inner:
            torch.empty(10)
            assert inner.read() == 40
        assert outer.read() == 4000
        kept = torch.empty(500)
        with PeakProbe("cpu") as second:
            torch.empty(600)
            assert second.read() == 2400
        assert outer.read() == 4 * (500 + 600)
        assert outer.kept_bytes == kept.nbytes


def test_probes_may_overlap_without_nesting():
    first, second = PeakProbe("cpu"), PeakProbe("cpu")
    first.start()
    torch.empty(100)
    second.start()
    torch.empty(200)
    assert first.stop() == 800
    torch.empty(300)
    assert second.stop() == 1200


def test_probe_that_begins_again_forgets_the_past():
    probe = PeakProbe("cpu")
    probe.start()
    torch.empty(1000)
    probe.start()
    torch.empty(10)
    assert probe.stop() == 40


def test_probe_that_never_started_reads_nothing():
    assert PeakProbe("cpu").stop() == 0


def test_probe_sees_the_bytes_of_other_threads():
    with PeakProbe("cpu") as probe:
        thread = threading.Thread(target=torch.empty, args=(1000,))
        thread.start()
        thread.join()
        assert probe.read() == 4000


def test_device_is_the_cpu_unless_cuda_is_in_use():
    expected = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    assert resolve_device(None).type == expected
    assert resolve_device("cpu:0") == torch.device("cpu")


@pytest.mark.parametrize(("device", "works"), [("cpu", True), ("cuda:0", True), ("meta", False)])
def test_probes_are_for_cpu_and_cuda(device, works):
    assert probe_available(device) == works
