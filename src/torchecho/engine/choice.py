"""What a plan means for the steps of a program, and how to run one of them."""

from dataclasses import dataclass

from torchecho.apply.policy import Policy
from torchecho.engine.draft import Draft
from torchecho.engine.situation import Situation
from torchecho.engine.sizes import Sizes
from torchecho.planner.plan import Plan


@dataclass(frozen=True)
class Planned:
    """A plan for steps of one situation.

    Attributes:
        sizes: What it decides at each call, and what of that smaller steps may do without.
        floor: The same of the plan with the smallest peak: for steps that are larger than any that was planned.
        number: Its place in the journal.
        start_bytes: Bytes that are alive when such a step begins.
        given_bytes: Bytes of what it is given.
    """

    sizes: Sizes
    floor: Sizes
    number: int
    start_bytes: int
    given_bytes: int

    @staticmethod
    def of(draft: Draft, plan: Plan, number: int, given_bytes: int) -> "Planned":
        """Return what a plan means call by call."""
        sizes, floor = (
            Sizes(draft.policy(windows), plan.budget_bytes) for windows in (plan.reuse_windows, plan.floor_windows)
        )
        return Planned(sizes, floor, number, draft.start_bytes, given_bytes)

    def for_other_size(self, sizes: Sizes, situation: Situation) -> "Choice":
        """Return how to run a step that no plan was made for, under one of its two sorts of policies."""
        policy, is_new = sizes.policy_for(situation)
        if is_new:
            return Choice(policy, records=False, measured=self, learns=sizes)
        return Choice(unless_idle(policy), records=False)


@dataclass(frozen=True)
class Choice:
    """How to run a step: under which policy, and whether to record and to measure it.

    Attributes:
        measured: The plan whose peak is to be measured, or that a step of another size follows; None not to measure.
        is_safe: Run it in little memory though there is no plan.
        learns: Who is to learn what a step of another size may do without.
    """

    policy: Policy | None
    records: bool
    measured: Planned | None = None
    is_safe: bool = False
    learns: Sizes | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the step simply runs."""
        return self.policy is None and not self.records and self.measured is None


def unless_idle(policy: Policy) -> Policy | None:
    """Return a policy that recomputes something; None for one that does not."""
    return policy if policy.recomputes else None
