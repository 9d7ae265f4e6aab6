"""Decisions call by call, and by place where a step leaves the recorded way."""

import sys
from collections.abc import Callable

import torch

from torchecho.apply.policy import KEEP, WRITE, Follower, Policy
from torchecho.capture.place import Place, find_place

ATEN = torch.ops.aten
TANH, MUL, EXP, ADD_ = ATEN.tanh.default, ATEN.mul.Tensor, ATEN.exp.default, ATEN.add_.Tensor


def program(call: Callable[[object], object], length: int, *, branch: bool = False) -> list[object]:
    """Make calls at four places: before a loop, on a branch, in the loop and after it."""
    made = [call(MUL)]
    if branch:
        made.append(call(ADD_))
    made += [call(TANH) for _ in range(length)]
    made.append(call(EXP))
    return made


def places_of(length: int) -> list[Place]:
    """Return the places of the program's calls."""
    found: list[Place] = []
    program(lambda func: found.append(find_place(func, sys._getframe(1))), length)
    return found


def policy_of(*decisions: int | None) -> Policy:
    """Return the policy of a recorded program whose loop makes up the difference."""
    places = places_of(len(decisions) - 2)
    return Policy(tuple(place[0] for place in places), decisions, tuple(places))


def follow(policy: Policy, length: int, *, branch: bool = False) -> tuple[list[object], Follower]:
    """Walk the program beside a policy; the follower looks past its caller, as past a dispatch mode."""
    follower = Follower(policy)

    def dispatch(func: object) -> int | None:
        return follower.next(func)

    return program(dispatch, length, branch=branch), follower


def test_same_step_follows_call_by_call() -> None:
    found, follower = follow(policy_of(5, 1, KEEP, 2, KEEP), 3)
    assert found == [5, 1, KEEP, 2, KEEP]
    assert not follower.is_lost


def test_shorter_loop_does_what_the_longer_one_did_in_its_first_rounds() -> None:
    found, follower = follow(policy_of(5, 1, KEEP, 2, 7), 2)
    assert found == [5, 1, KEEP, 7]
    assert follower.is_lost


def test_longer_loop_goes_on_as_the_last_recomputed_round() -> None:
    found, _ = follow(policy_of(KEEP, 1, 2, KEEP, KEEP), 5)
    assert found == [KEEP, 1, 2, KEEP, 2, 2, KEEP]


def test_longer_loop_goes_on_as_before_where_all_recorded_rounds_are_kept() -> None:
    policy = policy_of(KEEP, 1, 2, KEEP)
    kept = policy.without([1, 2], has_more_calls=True)
    assert follow(kept, 4)[0] == [KEEP, KEEP, KEEP, 2, 2, KEEP]
    assert kept.recomputes
    again = kept.without([], has_more_calls=True)
    assert follow(again, 3)[0] == [KEEP, KEEP, KEEP, 2, KEEP]


def test_policy_that_keeps_all_has_nothing_to_do_where_no_step_makes_more_calls() -> None:
    kept = policy_of(KEEP, 1, 2, KEEP).without([1, 2], has_more_calls=False)
    assert not kept.recomputes
    assert follow(kept, 1)[0] == [KEEP, KEEP, KEEP]


def test_other_branch_is_left_alone_and_what_follows_is_found_again() -> None:
    found, follower = follow(policy_of(5, 1, 2, KEEP), 2, branch=True)
    assert found == [5, WRITE, 1, 2, KEEP]
    assert follower.is_lost


def test_rounds_before_the_step_was_lost_are_counted() -> None:
    """Two rounds as recorded, then one call that was not: the next round is the third."""
    policy = policy_of(KEEP, 1, 2, 3, 4, KEEP)
    follower = Follower(policy)

    def dispatch(func: object) -> int | None:
        return follower.next(func)

    assert [dispatch(MUL), *(dispatch(TANH) for _ in range(2)), dispatch(ADD_)] == [KEEP, 1, 2, WRITE]
    assert follower.is_lost
    assert follower._seen[policy.places[1]] == 2


def test_step_that_ends_early_is_lost() -> None:
    follower = Follower(policy_of(KEEP, 1, 2, KEEP))
    follower.next(MUL)
    assert follower.is_lost


def test_policy_without_recipes_has_nothing_to_do() -> None:
    assert not Policy((MUL, ADD_), (KEEP, WRITE), ((MUL, None, 0), (ADD_, None, 0))).recomputes
    assert Policy((MUL,), (0,), ((MUL, None, 0),)).recomputes


def test_only_places_with_a_recipe_are_looked_up() -> None:
    policy = policy_of(KEEP, 1, KEEP, KEEP)
    assert dict(policy.by_place) == {policy.places[1]: (1, KEEP)}
    assert policy.recomputed_calls == {TANH}
