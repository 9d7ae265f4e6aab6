"""Policies for steps of other sizes than a planned one, which have room to recompute less.

Nothing is recorded or planned for them. A step that follows a policy is weighed (`torchecho.apply.scales`), and what it
may keep (`torchecho.planner.relief`) makes the policy of every step that is nowhere larger.
"""

from dataclasses import dataclass, field

from torchecho.apply.policy import Policy
from torchecho.apply.scales import Scales
from torchecho.engine.situation import Situation, closest
from torchecho.planner.relief import relieve

_MOST_POLICIES = 256
_MUCH_LARGER = 1.1  # a policy for a step this many times larger recomputes more than need be


@dataclass(eq=False)
class Sizes:
    """A policy, and what steps of other sizes do of it.

    Attributes:
        policy: What every step may follow for which the policy was meant.
        budget_bytes: What a step should stay inside; None where there is no budget, and so nothing to gain.
    """

    policy: Policy
    budget_bytes: int | None
    _policies: dict[Situation, Policy] = field(default_factory=dict)
    _too_large: set[Situation] = field(default_factory=set)

    def policy_for(self, situation: Situation) -> tuple[Policy, bool]:
        """Return the policy of the smallest known step that is nowhere smaller, and whether to weigh the step.

        It is worth weighing where it is much smaller than that, and may keep more.
        """
        found = closest(situation, self._policies)
        policy = self.policy if found is None else found[1]
        may_learn = self.budget_bytes is not None and len(self._policies) < _MOST_POLICIES and policy.recomputes
        return policy, may_learn and (found is None or found[0].volume > _MUCH_LARGER * situation.volume)

    def is_too_large(self, situation: Situation) -> bool:
        """Return whether such a step was over the budget although it followed the policy."""
        return situation in self._too_large

    def learn(self, situation: Situation, followed: Policy, scales: Scales) -> None:
        """Make the policy of a step that was weighed while it followed another."""
        assert self.budget_bytes is not None, "only steps under a budget are weighed"
        if max(scales.peaks) > self.budget_bytes:  # a step may need more than a larger one
            self._too_large.add(situation)
            self._policies = {at: policy for at, policy in self._policies.items() if not at.covers(situation)}
            return
        self._policies[situation] = relieved(followed, scales, self.budget_bytes)


def relieved(followed: Policy, scales: Scales, budget_bytes: int) -> Policy:
    """Return what a step that was weighed while it followed a policy, and steps nowhere larger, may do instead."""
    kept = relieve(scales.peaks, scales.calls, followed.worth, budget_bytes)
    return followed.without(kept, has_more_calls=any(call.call is None for call in scales.calls))
