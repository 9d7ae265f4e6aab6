"""Modes and hooks that are opened and closed out of order."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from torchecho.engine import scope


class Counting(TorchDispatchMode):
    """Counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _pack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _hooks() -> tuple:
    return (lambda tensor: tensor, _pack)


@pytest.fixture(autouse=True)
def nothing_is_left() -> object:
    yield
    assert scope.num_modes() == 0
    assert scope.outer_hooks() is None


def test_mode_below_another_is_taken_out() -> None:
    ours, users = Counting(), Counting()
    scope.push_mode(ours)
    with users:
        scope.remove_mode(ours)
        assert _get_current_dispatch_mode_stack() == [users]
        torch.ones(1)
    assert (ours.calls, users.calls) == (0, 1)


def test_mode_above_another_is_taken_out() -> None:
    ours, users = Counting(), Counting()
    with users:
        scope.push_mode(ours)
        torch.ones(1)
        scope.remove_mode(ours)
        torch.ones(1)
    assert (ours.calls, users.calls) == (1, 2)


def test_mode_that_is_not_there() -> None:
    users = Counting()
    with users:
        scope.remove_mode(Counting())
        assert _get_current_dispatch_mode_stack() == [users]


def test_mode_is_put_on_twice_in_turn() -> None:
    ours = Counting()
    for _ in range(2):
        scope.push_mode(ours)
        torch.ones(1)
        scope.remove_mode(ours)
    assert ours.calls == 2


def test_hooks_below_others_are_taken_out() -> None:
    ours, users = _hooks(), _hooks()
    scope.push_hooks(ours)
    with saved_tensors_hooks(*users):
        scope.remove_hooks(ours)
        assert scope.outer_hooks() == users
    assert scope.outer_hooks() is None


def test_hooks_that_are_not_there() -> None:
    users = _hooks()
    with saved_tensors_hooks(*users):
        scope.remove_hooks(_hooks())
        assert scope.outer_hooks() == users
