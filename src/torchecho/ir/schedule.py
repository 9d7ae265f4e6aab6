"""The schedule: which op runs at each step, copies included."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Schedule:
    """Ops in the order in which they run; an op that appears again is a recomputed copy.

    An op reads the newest copy of each storage, and a copy is freed after its last read.

    Attributes:
        steps: Indices of ops (never of views).
        num_forward: How many of the steps run before the backward phase begins.
    """

    steps: tuple[int, ...]
    num_forward: int

    @cached_property
    def ops(self) -> npt.NDArray[np.int64]:
        """Steps as an array."""
        return np.array(self.steps, dtype=np.int64)

    @property
    def forward(self) -> tuple[int, ...]:
        """Steps of the forward phase."""
        return self.steps[: self.num_forward]

    @property
    def backward(self) -> tuple[int, ...]:
        """Steps of the backward phase, recomputed copies among them."""
        return self.steps[self.num_forward :]


def schedule_of(ops: npt.NDArray[np.int64], num_forward: int) -> Schedule:
    """Return the schedule of steps that are an array already, which it keeps."""
    schedule = Schedule(tuple(ops.tolist()), num_forward)
    schedule.__dict__["ops"] = ops  # where the property keeps it: thousands of steps are converted for each candidate
    return schedule
