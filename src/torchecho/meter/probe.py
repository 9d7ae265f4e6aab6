"""Peak probes: several nested readers of an allocator's one peak counter."""

import functools
import threading
import weakref
from types import TracebackType
from typing import Protocol, Self

import torch

from torchecho.meter import allocator
from torchecho.meter.cuda import CudaCounter


class Counter(Protocol):
    """An allocator's counters: live bytes and the one peak that can be reset."""

    def live_bytes(self) -> int:
        """Return the bytes live now."""
        ...

    def peak_bytes(self) -> int:
        """Return the most bytes live since the last reset."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak at what is live now."""
        ...


class PeakProbe:
    """Measures the peak of live bytes between `start` and `stop`, above what was live at `start`.

    Probes of one device may nest, overlap and sit in different threads; all of them see the bytes of the whole process.
    Use it as a context manager or call `start` and `stop`.

    Args:
        device: Device to watch; None: the current CUDA device when CUDA is in use, else the CPU.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = resolve_device(device)
        self._start_bytes = 0

    def start(self) -> None:
        """Begin; a probe that runs already begins again.

        Raises:
            MeasureError: the live bytes of the CPU cannot be counted (no compiler); `probe_available` tells before.
        """
        self._start_bytes = _ledger(self._device).open(self)

    def read(self) -> int:
        """Return the peak above the start so far; 0 before `start`."""
        return max(0, _ledger(self._device).read(self) - self._start_bytes)

    def stop(self) -> int:
        """End, and return the peak above the start; 0 before `start`."""
        peak_bytes = self.read()
        _ledger(self._device).close(self)
        return peak_bytes

    @property
    def start_bytes(self) -> int:
        """Bytes that were live at `start`."""
        return self._start_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes live now above the start; negative when more was freed than allocated."""
        return counter_of(self._device).live_bytes() - self._start_bytes

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; `read` stays valid only inside the block."""
        self.stop()


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return the device asked for, with an index for CUDA; None: CUDA when in use, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    device = torch.device(device)
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def probe_available(device: torch.device | str | None = None) -> bool:
    """Say whether probes work on the device; on the CPU this builds the counting allocator at the first call."""
    kind = resolve_device(device).type
    return allocator.available() if kind == "cpu" else kind == "cuda"


def counter_of(device: torch.device) -> Counter:
    """Return the counters of a device that `resolve_device` returned."""
    return allocator if device.type == "cpu" else CudaCounter(device)


class _Ledger:
    """Keeps the peak of each open probe across resets of the one counter below them.

    Every call first folds the counter's peak into all open probes and resets it: no probe loses what it has seen.
    Probes are held weakly: one that is dropped without `stop` disappears.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._lock = threading.Lock()
        self._peaks: weakref.WeakKeyDictionary[PeakProbe, int] = weakref.WeakKeyDictionary()

    def open(self, probe: PeakProbe) -> int:
        with self._lock:
            self._fold()
            self._peaks[probe] = start_bytes = self._counter.live_bytes()
            return start_bytes

    def read(self, probe: PeakProbe) -> int:
        with self._lock:
            self._fold()
            return self._peaks.get(probe, 0)

    def close(self, probe: PeakProbe) -> None:
        with self._lock:
            self._peaks.pop(probe, None)

    def _fold(self) -> None:
        seen_bytes = self._counter.peak_bytes()
        self._counter.reset_peak()
        for probe in list(self._peaks):
            self._peaks[probe] = max(self._peaks[probe], seen_bytes)


@functools.cache
def _ledger(device: torch.device) -> _Ledger:
    """Return the one ledger of a device; the cache is for the life of the process."""
    return _Ledger(counter_of(device))
