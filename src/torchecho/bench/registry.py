"""The workloads of ``torchecho bench``, by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchecho.bench import eager, nmt, planner, rnn
from torchecho.bench.processes import Tell
from torchecho.errors import OptionError
from torchecho.options import nearest
from torchecho.report.results import ResultRow

SIZES = ("full", "tiny")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload.

    Attributes:
        name: What the user types.
        run: Measures it at a size on a device and yields its rows.
        devices: What it can be measured on.
    """

    name: str
    run: Callable[[str, Tell, str], list[ResultRow]]
    devices: tuple[str, ...] = ("cpu",)


WORKLOADS = (
    Workload("nmt", nmt.run, DEVICES),
    Workload("eager", eager.run, DEVICES),
    Workload("planner", planner.run),
    Workload("rnn", rnn.run),
)


def select(names: Sequence[str]) -> list[Workload]:
    """Return the workloads of these names; all of them when there are none.

    Raises:
        OptionError: a name is unknown.
    """
    known = {workload.name: workload for workload in WORKLOADS}
    for name in names:
        if name not in known:
            raise OptionError(f"unknown workload {name!r}{nearest(name, tuple(known))} (there are: {', '.join(known)})")
    if not names:
        return list(WORKLOADS)
    return [known[name] for name in names]


def check_size(size: str) -> str:
    """Return the size if it is one.

    Raises:
        OptionError: it is not.
    """
    if size not in SIZES:
        raise OptionError(f"size must be one of {', '.join(SIZES)}; got {size!r}{nearest(size, SIZES)}")
    return size


def check_device(device: str, chosen: Sequence[Workload]) -> str:
    """Return the device if it is there and every chosen workload can be measured on it.

    Raises:
        OptionError: it is not.
    """
    if device not in DEVICES:
        raise OptionError(f"device must be one of {', '.join(DEVICES)}; got {device!r}{nearest(device, DEVICES)}")
    for workload in chosen:
        if device not in workload.devices:
            able = ", ".join(one.name for one in WORKLOADS if device in one.devices)
            raise OptionError(f"workload {workload.name!r} is not measured on {device} (those are: {able})")
    if device == "cuda" and not _cuda_is_available():
        raise OptionError("device is cuda, but PyTorch finds no CUDA device here; leave --device out to use the CPU")
    return device


def _cuda_is_available() -> bool:
    import torch  # noqa: PLC0415 - takes a second, and only this question needs it

    return torch.cuda.is_available()
