"""The workloads of ``torchecho bench``, by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchecho.bench import eager, nmt, planner, rnn
from torchecho.bench.processes import Tell
from torchecho.errors import OptionError
from torchecho.options import nearest
from torchecho.report.results import ResultRow

SIZES = ("full", "tiny")


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload.

    Attributes:
        name: What the user types.
        summary: One line for the help.
        run: Measures it at a size and yields its rows; None while it is not built.
    """

    name: str
    summary: str
    run: Callable[[str, Tell], list[ResultRow]] | None = None


WORKLOADS = (
    Workload("nmt", "attention LSTM translator, characters", nmt.run),
    Workload("eager", "unmodified programs in the eager engine, many lengths, cost of a call", eager.run),
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
