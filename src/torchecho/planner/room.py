"""Spend the room that a plan leaves: keep what takes longest for its bytes where other moments are at the peak.

One thing that has to be recomputed, such as a layer whose backward needs much, leaves a wide gap in the Pareto set: the
plan on its far side is far below the next larger peak there, and nearly as far below it at most other moments. What
lives at those only can be kept instead. It then fills the times between its copies, so that the live bytes of any such
choice are a sum, and a greedy pass finds what fits below a peak without a simulation.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchecho.planner.decisions import SINGLE_COPY, Needs
from torchecho.planner.repetition import with_class
from torchecho.planner.search import Candidate, Search
from torchecho.simulate.replay import find_copies, live_bytes

_LEVELS = 8  # peaks to try in a gap
_STEPS_OF_QUESTION = 64  # what asking whether an op fits costs, in simulated steps

_Span = tuple[int, int, int]  # first step, step after the last, bytes


def fill_gap(search: Search, larger: Candidate, smaller: Candidate) -> None:
    """Simulate what the smaller of two neighbours of the Pareto set can keep below peaks up to that of the larger."""
    room = _room_of(search, smaller)
    left = sorted(room.spans, key=lambda op: (-room.worth(op, search.copy_seconds), op))
    for level in range(1, _LEVELS + 1):
        below_bytes = smaller.peak_bytes + (larger.peak_bytes - smaller.peak_bytes) * level // _LEVELS
        asked = [op for op in left if op not in room.spared]
        left = [op for op in asked if not room.keep(op, below_bytes)]
        search.spent += _STEPS_OF_QUESTION * len(asked)
        if len(left) < len(asked) and not search.is_spent:
            kept = with_class(smaller.decisions, room.kept, recompute=False, window=SINGLE_COPY)
            search.simulate(kept, "kept in room")


@dataclass
class _Room:
    """What is kept of the ops that a candidate recomputes.

    Attributes:
        num_copies: For each op how often the candidate runs it again.
        spans: For each op that may be kept, when it lives then and did not.
        load: Live bytes at each step, at most.
        kept: Ops that are kept.
        spared: Ops that nothing recomputed reads any more.
    """

    needs: Needs
    num_copies: npt.NDArray[np.int64]
    spans: dict[int, list[_Span]]
    load: npt.NDArray[np.int64]
    kept: list[int] = field(default_factory=list)
    spared: set[int] = field(default_factory=set)

    def worth(self, op: int, copy_seconds: npt.NDArray[np.float64]) -> float:
        """Return the seconds that keeping an op saves, per byte of it."""
        saved = [op, *self._spared_by(op, frozenset())]
        return float(self.num_copies[saved] @ copy_seconds[saved]) / max(sum(size for *_, size in self.spans[op]), 1)

    def keep(self, op: int, below_bytes: int) -> bool:
        """Keep an op if the load stays below so many bytes; return whether it does."""
        if any(self.load[begin:end].max() + size >= below_bytes for begin, end, size in self.spans[op]):
            return False
        for begin, end, size in self.spans[op]:
            self.load[begin:end] += size
        self.kept.append(op)
        self.spared |= self._spared_by(op, {*self.kept, *self.spared})
        return True

    def _spared_by(self, op: int, gone: AbstractSet[int]) -> set[int]:
        """Return what needs not be made again when an op is kept, and some others are or need not be either."""
        found, left = {op}, [op]
        while left:
            for maker in self.needs.makers[left.pop()]:
                is_for_backward = self.needs.backward_uses[maker] or not self.num_copies[maker]
                readers = [reader for reader in self.needs.forward_readers[maker] if self.num_copies[reader]]
                if maker not in found and not is_for_backward and all(r in found or r in gone for r in readers):
                    found.add(maker)
                    left.append(maker)
        return found - {op}


def _room_of(search: Search, candidate: Candidate) -> _Room:
    """Return the room of a candidate: nothing is kept yet."""
    schedule = search.schedule(candidate.decisions)
    copies = find_copies(search.tables, schedule)
    is_read = copies.last_step > copies.born_step
    next_one = np.flatnonzero((copies.storage[1:] == copies.storage[:-1]) & is_read[1:])
    size_bytes = search.tables.size_bytes[copies.storage[next_one]]
    makers = np.array(search.graph.makers)[search.tables.producer[copies.storage[next_one]]]
    spans: dict[int, list[_Span]] = {}
    between = zip(copies.last_step[next_one] + 1, copies.born_step[next_one + 1], size_bytes, strict=True)
    for op, (begin, end, size) in zip(makers.tolist(), between, strict=True):
        if begin < end:
            spans.setdefault(op, []).append((int(begin), int(end), int(size)))
    num_copies = np.bincount(schedule.ops[schedule.num_forward :], minlength=len(search.graph.ops))
    return _Room(search.needs, num_copies, spans, live_bytes(search.tables, schedule, copies))
