"""What to do at each call of a program: the decisions of a plan, by position and by place.

A step that makes the same calls as the recorded one follows the plan call by call. One that leaves the recorded way
(other lengths, another branch) follows it by place: what the plan decided for the k-th call of a place in the program
holds for the k-th call of this step there. A shorter loop so does what the longer one did in its first rounds, and
stashes no more.
"""

import sys
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from torchecho.capture.place import Place, find_place
from torchecho.capture.schema import changes_secretly

KEEP = None
WRITE = -1
FOLLOW = -2


class ApiCall(NamedTuple):
    """What the program called of PyTorch's API, and the calls below autograd that this made.

    Attributes:
        begin: Position of the first of these calls.
        end: Position after the last.
        saves: Something that a recipe makes was saved in it.
        is_touched: The policy had something else to do in it, or it changes what it is given.
    """

    func: Any
    begin: int
    end: int
    saves: bool
    is_touched: bool


@dataclass(eq=False)
class Outline:
    """What a step that follows a policy calls of PyTorch's API at its beginning, or all of it.

    Attributes:
        calls: In order, all calls of what ever made a call below autograd; empty until that is known.
        idle: What was called and never made one.
        noted: The longest beginning of a step that was noted.
        num_tries: How many steps were watched for it.
    """

    calls: tuple[ApiCall, ...] = ()
    idle: frozenset[Hashable] = frozenset()
    noted: tuple[ApiCall, ...] = ()
    num_tries: int = 0

    def settle(self) -> None:
        """Take what was noted for all that will be known."""
        busy = {call.func for call in self.noted if call.end > call.begin or call.is_touched}
        self.calls = tuple(call for call in self.noted if call.func in busy)
        self.idle = frozenset(call.func for call in self.noted) - busy


@dataclass(frozen=True)
class Policy:
    """The decisions of a plan.

    Attributes:
        calls: What the recorded step called, in order.
        decisions: For each call `KEEP`, `WRITE` (it changes something in place), the window of its recipe, or `FOLLOW`
            (it is repeated together with the call whose result it changes or reads).
        places: Where in the program each call stands.
        worth: For each call the seconds that recomputing it takes, per byte that it makes.
        beyond: For each place what the calls do that a step makes beyond those of the recorded one; None for what the
            last one there does that is recomputed.
        outline: What is known of the calls above these.
    """

    calls: tuple[Any, ...]
    decisions: tuple[int | None, ...]
    places: tuple[Place, ...]
    worth: tuple[float, ...] = ()
    beyond: Mapping[Place, int] | None = None
    outline: Outline = field(default_factory=Outline, compare=False)

    def without(self, kept: Collection[int], *, has_more_calls: bool) -> "Policy":
        """Return the policy that does not recompute some of the calls.

        Args:
            kept: Positions of these calls.
            has_more_calls: Whether it is for steps that make more calls at a place than the recorded one: those do what
                they did.
        """
        decisions = list(self.decisions)
        for position in kept:
            decisions[position] = kept_as_it_is(self.calls[position])
        beyond = self.more_calls if has_more_calls else {}
        outline = self.outline if self.outline.calls else Outline()  # where more is done, more is loud, but not less
        return replace(self, decisions=tuple(decisions), beyond=beyond, outline=outline)

    @cached_property
    def recomputes(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.beyond) or any(decision is not KEEP and decision >= 0 for decision in self.decisions)

    @cached_property
    def by_place(self) -> Mapping[Place, tuple[int | None, ...]]:
        """For each place where something is recomputed the decisions of its calls, in order."""
        found = {place: tuple(self.decisions[p] for p in positions) for place, positions in self.positions.items()}
        beyond = self.beyond or {}
        return {p: all_ for p, all_ in found.items() if p in beyond or any(d is not KEEP and d != WRITE for d in all_)}

    @cached_property
    def more_calls(self) -> Mapping[Place, int]:
        """For each place where something is recomputed what more calls do there than the recorded step has."""
        if self.beyond is not None:
            return self.beyond
        return {place: next(d for d in reversed(all_) if d is not KEEP) for place, all_ in self.by_place.items()}

    @cached_property
    def positions(self) -> Mapping[Place, Sequence[int]]:
        """For each place the positions of its calls, in order."""
        found: dict[Place, list[int]] = {}
        for position, place in enumerate(self.places):
            found.setdefault(place, []).append(position)
        return found

    @cached_property
    def recomputed_calls(self) -> frozenset[Hashable]:
        """What is called at any place where something is recomputed."""
        return frozenset(place[0] for place in self.by_place)


class Follower:
    """Walks a program beside a policy.

    Attributes:
        position: How many calls were made.
    """

    def __init__(self, policy: Policy) -> None:
        self.position = -1
        self._policy = policy
        self._calls, self._decisions = policy.calls, policy.decisions
        self._is_lost = False
        self._seen: Counter[Place] = Counter()
        self._last: tuple[Place, int] | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the program has left the recorded way."""
        return self._is_lost or self.position + 1 != len(self._calls)

    @property
    def is_on_course(self) -> bool:
        """Whether the program has called what the policy says so far."""
        return not self._is_lost

    def go_to(self, position: int) -> None:
        """Take the calls before a position for made as the policy says."""
        self.position = position - 1

    @property
    def planned_position(self) -> int | None:
        """Position in the policy of the call that was decided about last; None for a round more than it has."""
        if self._last is None:
            return self.position
        place, occurrence = self._last
        positions = self._policy.positions[place]
        return positions[occurrence] if occurrence < len(positions) else None

    def next(self, func: Any) -> int | None:
        """Return the decision for the next call."""
        self.position = position = self.position + 1
        if not self._is_lost:
            if position < len(self._calls) and self._calls[position] is func:
                return self._decisions[position]
            self._is_lost = True
            self._seen = Counter(p for p in self._policy.places[:position] if p in self._policy.by_place)
        otherwise = kept_as_it_is(func)
        if func not in self._policy.recomputed_calls:
            return otherwise
        place = find_place(func, sys._getframe(2))
        decisions = self._policy.by_place.get(place)
        if decisions is None:
            return otherwise
        occurrence = self._seen[place]
        self._seen[place] = occurrence + 1
        self._last = place, occurrence
        if occurrence < len(decisions):
            return decisions[occurrence]
        return self._policy.more_calls.get(place, otherwise)


def kept_as_it_is(func: Any) -> int | None:
    """Return the decision about a call that is not recomputed."""
    return WRITE if func._schema.is_mutable or changes_secretly(func) else KEEP
