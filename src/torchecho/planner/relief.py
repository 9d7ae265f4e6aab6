"""Relief: what a step that has room to spare need not recompute, although the plan for a larger step does.

Such a step is not simulated but measured while it follows the plan: the peak of each segment of its course, and each
call that it recomputed. Keeping what a call makes costs its bytes from the forward until the backward has used it for
the last time. Whoever keeps a result keeps what it is made of, too, as far as anyone else needs that: then all that is
still recomputed is recomputed when it was before, and no peak is above the measured one plus what is kept.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

_MOST_TOGETHER = 64  # calls that are kept together or not at all


@dataclass(slots=True)
class RecomputedCall:
    """A call that a measured step recomputed.

    Attributes:
        call: Its position among the calls of the policy; None where it is none of them.
        result_bytes: Bytes of its results, by their index.
        last_uses: For each result that autograd has saved, the last segment that asked for it.
        reads: (number, result) of what it reads of recomputed calls before it.
    """

    call: int | None
    result_bytes: dict[int, int] = field(default_factory=dict)
    last_uses: dict[int, int] = field(default_factory=dict)
    reads: set[tuple[int, int]] = field(default_factory=set)


def relieve(
    peaks: Sequence[int], calls: Sequence[RecomputedCall], worth: Sequence[float], budget_bytes: int
) -> frozenset[int]:
    """Return the positions of calls that the step may keep instead: those first that take longest for their bytes.

    Args:
        peaks: Most live bytes in each segment; the first is the forward and what follows it until the backward first
            asks for something that is recomputed.
        calls: What was recomputed, in order.
        worth: Seconds per byte of each call of the policy.
        budget_bytes: What no segment may exceed.
    """
    load, kept = np.array(peaks, dtype=np.int64), set[int]()
    readers, last_needs = _needs(calls)
    order = [(one.call, number) for number, one in enumerate(calls) if one.call is not None and last_needs[number] >= 0]
    for _, number in sorted(order, key=lambda one: (-worth[one[0]], one[0])):
        together = _with_makers(calls, number, kept)
        if together is None:
            continue
        more = load.copy()
        for member in together:
            lives = _lives(calls[member], readers[member], kept | together, last_needs)
            for result, last in lives.items():
                more[: last + 1] += calls[member].result_bytes.get(result, 0)
        if more.max() <= budget_bytes:
            load, kept = more, kept | together
    return frozenset(call for number in kept if (call := calls[number].call) is not None)


_Reads = Sequence[tuple[int, int]]  # who reads, and which result


def _needs(calls: Sequence[RecomputedCall]) -> tuple[Sequence[_Reads], Sequence[int]]:
    """Return for each call who reads its results, and the last segment that needs any of them; -1 where none does."""
    readers: list[list[tuple[int, int]]] = [[] for _ in calls]
    last_needs = [max(one.last_uses.values(), default=-1) for one in calls]
    for number in reversed(range(len(calls))):  # who reads comes after what it reads
        for maker, result in calls[number].reads:
            readers[maker].append((number, result))
            last_needs[maker] = max(last_needs[maker], last_needs[number])
    return readers, last_needs


def _with_makers(calls: Sequence[RecomputedCall], number: int, kept: AbstractSet[int]) -> frozenset[int] | None:
    """Return a call and all that it is made of and is not kept; None where that cannot be kept, or is very much."""
    found, left = {number}, [number]
    while left:
        for maker, _ in calls[left.pop()].reads:
            if maker not in kept and maker not in found:
                found.add(maker)
                left.append(maker)
        if len(found) > _MOST_TOGETHER:
            return None
    return None if number in kept or any(calls[one].call is None for one in found) else frozenset(found)


def _lives(call: RecomputedCall, readers: _Reads, kept: AbstractSet[int], last_needs: Sequence[int]) -> dict[int, int]:
    """Return the last segment to which each result lives that autograd, or who is not kept, still needs."""
    lives = dict(call.last_uses)
    for reader, result in readers:
        if reader not in kept and last_needs[reader] >= 0:
            lives[result] = max(lives.get(result, 0), last_needs[reader])
    return lives
