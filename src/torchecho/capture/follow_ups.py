"""Find calls that must be repeated together, because some change in place what others make.

A repetition begins with a call that makes something and goes on with its follow-ups: the calls that change in place
what the repetition has made so far, and the calls that read it before such a change. Made again in this order on fresh
memory, all of them give what they gave, as long as whatever else they read is still there as it was.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torchecho.capture.describe import Look, looks
from torchecho.capture.recording import NO_STORAGE, Call, Recording
from torchecho.capture.rules import may_follow

CHANGED_LATER = "the program changes in place what it reads"
CHANGED_ITSELF = "the program changes in place what it makes"


def last_writes(recording: Recording) -> dict[int, int]:
    """Return the position of the last call that changes a storage in place, by storage."""
    found: dict[int, int] = {}
    for position, call in enumerate(recording.calls):
        found.update(dict.fromkeys((*call.writes, *call.secret_writes), position))
    return found


def find_repetitions(recording: Recording, backward_starts: int, reasons: dict[int, str]) -> list[tuple[int, ...]]:
    """Return the positions of the calls of each repetition, in order; calls in none are judged by `reasons` alone.

    Args:
        recording: A step.
        backward_starts: Where its forward ends.
        reasons: Why calls may not be repeated alone, by position. Those of calls in a repetition are taken out; added
            are those of calls that read what a repetition makes before it has ended.
    """
    finder = _Finder(recording, backward_starts, reasons)
    found = {unit[0]: unit for unit in finder.units()}
    maker = {s: unit[-1] for unit in found.values() for p in unit for s in recording.calls[p].allocates}
    first = {s: unit[0] for unit in found.values() for p in unit for s in recording.calls[p].allocates}
    for unit in list(found.values()):  # a repetition has ended when another reads what it makes
        for position in unit:
            for storage in recording.calls[position].reads:
                if storage in first and first[storage] != unit[0] and maker[storage] > position:
                    found.pop(first[storage], None)
    together = {position for unit in found.values() for position in unit}
    for position, call in enumerate(recording.calls[:backward_starts]):
        if position in together:
            reasons.pop(position, None)
        elif call.allocates and any(first.get(s) in found and maker[s] > position for s in call.reads):
            reasons.setdefault(position, CHANGED_LATER)
    return list(found.values())


class _Finder:
    """What finding repetitions needs to know of a recording."""

    def __init__(self, recording: Recording, backward_starts: int, reasons: Mapping[int, str]) -> None:
        self._calls, self._end, self._reasons = recording.calls, backward_starts, reasons
        self._last_write = last_writes(recording)
        self._touching: dict[int, list[int]] = defaultdict(list)
        self._wanted = {unpacking.storage for unpacking in recording.unpackings}
        for position, call in enumerate(recording.calls):
            if position < backward_starts and (call.writes or call.allocates):
                for storage in call.reads:
                    self._touching[storage].append(position)
            if call.writes:
                self._wanted.update(call.reads)

    def units(self) -> Iterator[tuple[int, ...]]:
        """Yield a repetition for each call that may be repeated together with what changes its results."""
        taken: set[int] = set()
        for position in range(self._end):
            if position not in taken and self._reasons.get(position) == CHANGED_ITSELF:
                unit = self._unit(position)
                if unit is not None:
                    taken.update(unit)
                    yield unit

    def _unit(self, first: int) -> tuple[int, ...] | None:
        """Return a call with its follow-ups; None where one of these may not be repeated."""
        made: dict[int, Any] = {}
        unit: list[int] = []
        waiting = [first]
        ends = first
        while waiting:
            position = heapq.heappop(waiting)
            call = self._calls[position]
            if unit and position == unit[-1]:
                continue
            if not made.keys().isdisjoint(call.writes):
                if not self._is_follow_up(call, position, made):
                    return None
            elif position != first and not (position < ends and self._is_worth_it(call, position, made)):
                continue
            unit.append(position)
            for look in looks(call.made) if call.allocates else ():
                if look.storage in call.allocates and look.storage not in made:
                    made[look.storage] = look.dtype
                    ends = max(ends, self._last_write.get(look.storage, 0))
                    for later in self._touching[look.storage]:
                        heapq.heappush(waiting, later)
            if ends >= self._end:
                return None  # the backward changes it
        return tuple(unit) if len(unit) > 1 else None

    def _is_follow_up(self, call: Call, position: int, made: Mapping[int, Any]) -> bool:
        args = call.args
        read = [look for look in looks(args) if look.storage != NO_STORAGE]
        return (
            not call.allocates
            and made.keys() >= set(call.writes)
            and self._reads_what_stays(call, position, made)
            and all(_is_plain(look, made) for look in read if look.storage in call.writes)
            and may_follow(call.func, args, call.kwargs, on_cuda=any(look.device.type == "cuda" for look in read))
        )

    def _is_worth_it(self, call: Call, position: int, made: Mapping[int, Any]) -> bool:
        """Return whether a call may be repeated in the middle, and anyone wants what it makes."""
        return (
            not call.writes
            and call.reads[0] in made  # by what it reads first, a running step knows where it belongs
            and not self._wanted.isdisjoint(call.allocates)
            and self._reasons.get(position, CHANGED_LATER) in (CHANGED_LATER, CHANGED_ITSELF)
            and self._reads_what_stays(call, position, made)
        )

    def _reads_what_stays(self, call: Call, position: int, made: Mapping[int, Any]) -> bool:
        return all(s in made or self._last_write.get(s, -1) <= position for s in call.needs)


def _is_plain(look: Look, made: Mapping[int, Any]) -> bool:
    return bool(look.dtype == made[look.storage]) and not look.is_conj and not look.is_neg
