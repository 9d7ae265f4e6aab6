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
        summary: One line for the help.
        run: Measures it at a size on a device and yields its rows; None while it is not built.
        devices: What it can be measured on.
    """

    name: str
    summary: str
    run: Callable[[str, Tell, str], list[ResultRow]] | None = None
    devices: tuple[str, ...] = ("cpu",)


WORKLOADS = (
    Workload("nmt", "attention LSTM translator, characters", nmt.run, DEVICES),
    Workload("eager", "unmodified programs in the eager engine, many lengths, cost of a call", eager.run, DEVICES),
    Workload("planner", "planning large synthetic graphs", planner.run),
    Workload("transformer", "transformer language model"),
    Workload("resnet", "convolutional network"),
    Workload("rnn", "recurrent layers beside torch.nn's", rnn.run),
    Workload("deepspeech2", "speech recogniser"),
)


def select(names: Sequence[str]) -> list[Workload]:
    """Return the workloads of these names; all that are built when there are none.

    Raises:
        OptionError: a name is unknown, or its workload is not built yet.
    """
    built = [workload for workload in WORKLOADS if workload.run is not None]
    if not names:
        return built
    known = {workload.name: workload for workload in WORKLOADS}
    there = ", ".join(workload.name for workload in built)
    for name in names:
        if name not in known:
            raise OptionError(f"unknown workload {name!r}{nearest(name, tuple(known))} (there are: {there})")
        if known[name].run is None:
            raise OptionError(f"workload {name!r} is not built yet (there are: {there})")
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
            able = ", ".join(one.name for one in WORKLOADS if one.run is not None and device in one.devices)
            raise OptionError(f"workload {workload.name!r} is not measured on {device} (those are: {able})")
    if device == "cuda" and not _cuda_is_available():
        raise OptionError("device is cuda, but PyTorch finds no CUDA device here; leave --device out to use the CPU")
    return device


def _cuda_is_available() -> bool:
    import torch  # noqa: PLC0415 - takes a second, and only this question needs it

    return torch.cuda.is_available()
