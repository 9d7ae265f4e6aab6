"""Relief: what a step that has room to spare need not recompute, although the plan for a larger step does.

Such a step is not simulated but measured while it follows the plan: the peak of each segment of its course, and each
call that it recomputed. Keeping what a call makes costs its bytes from the forward until the backward has used it for
the last time, and nothing else is alive longer than before: so no peak is above the measured one plus what is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


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
    load = np.array(peaks, dtype=np.int64)
    ends = _ends(calls)
    order = sorted(
        (
            (-worth[one.call], one.call, number)
            for number, one in enumerate(calls)
            if one.call is not None and ends[number]
        )
    )
    kept: set[int] = set()
    for _, call, number in order:
        more_bytes = sum(calls[number].result_bytes.get(result, 0) for result in ends[number])
        alive = load[: 1 + max(ends[number].values())]
        if alive.max() + more_bytes <= budget_bytes:
            alive += more_bytes
            kept.add(call)
    return frozenset(kept)


def _ends(calls: Sequence[RecomputedCall]) -> list[dict[int, int]]:
    """Return, for each call, the last segment in which each of its results is needed, for autograd or another call."""
    ends = [dict(one.last_uses) for one in calls]
    for number in reversed(range(len(calls))):
        if ends[number]:
            last = max(ends[number].values())
            for maker, result in calls[number].reads:
                ends[maker][result] = max(last, ends[maker].get(result, last))
    return ends
