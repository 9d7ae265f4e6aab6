"""Calls that have nothing to do with a policy run unwatched, and nothing of the result depends on it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.autograd.graph import saved_tensors_hooks

from tests.engine.eager_steps import SIZE, assert_clean, at_floor, gradients, network
from torchecho.apply.policy import Policy, kept_as_it_is
from torchecho.apply.tape import Tape, stash, unstash
from torchecho.capture.tape import Recorder
from torchecho.engine.quiet import Learner, Quiet, learner_for

_RECOMPUTED = "aten.tanh.default"
Program = Callable[[Tensor], Tensor]


def given() -> Tensor:
    """Return an input of some numbers that needs a gradient."""
    torch.manual_seed(0)
    return torch.randn(8, SIZE, requires_grad=True)


def policy_of(program: Program) -> Policy:
    """Return the policy that recomputes every tanh of a program."""
    recorder, x = Recorder(stash, unstash), given()
    with saved_tensors_hooks(recorder.pack, recorder.unpack), recorder:
        program(x)
    calls = recorder.finish().calls
    decisions = tuple(0 if str(call.func) == _RECOMPUTED else kept_as_it_is(call.func) for call in calls)
    places = tuple(call.place for call in calls if call.place is not None)
    return Policy(tuple(call.func for call in calls), decisions, places)


def backward_of(loss: Tensor, x: Tensor, tape: Tape) -> Tensor:
    """Return the gradient of x."""
    tape.end_forward()
    tape.runs_once = True
    loss.backward()
    assert x.grad is not None
    return x.grad


def learned(program: Program) -> Policy:
    """Return the policy of a program with its outline."""
    policy, x = policy_of(program), given()
    tape = Tape(policy)
    learner = Learner(tape, policy.outline)
    with saved_tensors_hooks(tape.pack, tape.unpack), tape, learner:
        loss = program(x)
    learner.end()
    assert torch.equal(backward_of(loss, x, tape), plain(program))
    return policy


def plain(program: Program) -> Tensor:
    """Return the gradient of plain PyTorch."""
    x = given()
    program(x).backward()
    assert x.grad is not None
    return x.grad


def quietly(program: Program, policy: Policy) -> tuple[Tensor, int, int]:
    """Return the gradient of a program that follows a known outline, and how many calls were watched and repeated."""
    x, tape, seen = given(), Tape(policy), list[Any]()
    follow = tape.follower.next

    def counted(func: Any) -> int | None:
        seen.append(func)
        return follow(func)

    tape.follower.next = counted  # type: ignore[method-assign]
    with Quiet(tape, (tape.pack, tape.unpack), policy.outline):
        loss = program(x)
    assert_nothing_is_active(tape)
    return backward_of(loss, x, tape), len(seen), tape.num_recomputed


def assert_nothing_is_active(tape: Tape) -> None:
    """Take away what a program that left its course has left active, as a pass does."""
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        assert mode is tape
        tape.__exit__(None, None, None)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert_clean()


def chain(x: Tensor) -> Tensor:
    """Return a number by calls that the policy has to do with in different ways."""
    return torch.mul(torch.tanh(torch.sigmoid(x)), torch.exp(x)).sum()


def test_only_what_a_policy_has_to_do_with_is_watched() -> None:
    policy = learned(chain)
    facts = {call.func.__name__: (call.saves, call.is_touched) for call in policy.outline.calls}
    assert facts == {
        "sigmoid": (False, False),
        "tanh": (True, True),
        "exp": (False, False),
        "mul": (True, False),
        "sum": (False, False),
    }
    found, num_watched, num_recomputed = quietly(chain, policy)
    assert torch.equal(found, plain(chain))
    assert (num_watched, num_recomputed) == (1, 1)


def test_what_changes_its_arguments_is_never_quiet() -> None:
    def program(x: Tensor) -> Tensor:
        doubled = x * 2
        doubled.add_(1)
        return (F.relu(doubled, inplace=True) + torch.tanh(x)).sum()

    touched = {call.func.__name__ for call in learned(program).outline.calls if call.is_touched}
    assert touched == {"add_", "relu", "tanh"}


@pytest.mark.parametrize("inplace", [False, True])
def test_change_in_place_that_was_not_learned_is_seen(inplace: bool) -> None:
    def program(x: Tensor, *, inplace: bool = False) -> Tensor:
        made = x * 2
        squashed = torch.tanh(made)
        return (squashed * 3 + F.relu(made, inplace=inplace)).sum()

    def changed(x: Tensor) -> Tensor:
        return program(x, inplace=inplace)

    found, _, num_recomputed = quietly(changed, learned(program))
    assert torch.equal(found, plain(changed))
    assert num_recomputed == 1


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_program_that_leaves_its_course_is_watched_from_there(turn: int) -> None:
    def program(x: Tensor, turn: int | None = None) -> Tensor:
        for index in range(3):
            x = torch.cos(x) if index == turn else torch.sin(x)
            x = torch.tanh(x) * 2
        return x.sum()

    def turned(x: Tensor) -> Tensor:
        return program(x, turn)

    found, num_watched, num_recomputed = quietly(turned, learned(program))
    assert torch.equal(found, plain(turned))
    # quiet until there: of each round before only tanh; from there on 3 calls a round, and the sum
    assert num_watched == turn + 3 * (3 - turn) + 1
    assert num_recomputed == 3


@pytest.mark.parametrize("turn", [0, 2])
def test_beginning_is_learned_of_steps_that_all_leave_their_course(turn: int) -> None:
    def program(x: Tensor, turn: int | None = None) -> Tensor:
        for index in range(3):
            x = torch.tanh(torch.cos(x) if index == turn else torch.sin(x)) * 2
        return x.sum()

    policy = policy_of(program)
    for _ in range(3):
        learner = learner_for(policy, tape := Tape(policy), nn.Identity())
        assert learner is not None
        x = given()
        with saved_tensors_hooks(tape.pack, tape.unpack), tape, learner:
            loss = program(x, turn)
        learner.end()
        assert torch.equal(backward_of(loss, x, tape), plain(lambda x: program(x, turn)))
    assert learner_for(policy, Tape(policy), nn.Identity()) is None
    assert len(policy.outline.calls) == 3 * turn
    for turned in (None, 0, 1, 2):
        found, *_ = quietly(lambda x, turned=turned: program(x, turned), policy)
        assert torch.equal(found, plain(lambda x, turned=turned: program(x, turned)))


class Doubled(torch.autograd.Function):
    """Saves what it is given outside of all calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return 2 x."""
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient, and look at what was saved."""
        return grad * 2 + 0 * ctx.saved_tensors[0]


def test_custom_function_is_watched_with_all_that_follows() -> None:
    def program(x: Tensor) -> Tensor:
        made = Doubled.apply(torch.tanh(torch.exp(x)))
        return (torch.tanh(made) * 3).sum()

    policy = policy_of(program)
    for _ in range(3):
        learner, x = learner_for(policy, tape := Tape(policy), nn.Identity()), given()
        assert learner is not None
        with saved_tensors_hooks(tape.pack, tape.unpack), tape, learner:
            program(x)
        learner.end()
    assert [call.func.__name__ for call in policy.outline.calls] == ["exp", "tanh", "mul"]
    found, _, num_recomputed = quietly(program, policy)
    assert torch.equal(found, plain(program))
    assert num_recomputed == 2


def test_hooks_of_the_program_come_first() -> None:
    packed: list[Tensor] = []

    def program(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
            x = torch.tanh(x * 2)
        return (torch.tanh(x) * 3).sum()

    policy = learned(program)
    packed.clear()
    expected = plain(program)
    num_packed = len(packed)
    found, *_ = quietly(program, policy)
    assert torch.equal(found, expected)
    assert len(packed) == 2 * num_packed > 0


def test_properties_of_tensors_are_no_calls_to_follow() -> None:
    def program(x: Tensor, *, looks: bool = True) -> Tensor:
        if looks:
            assert x.shape[0] == x.size(0)
        return (torch.tanh(x) * 2).sum()

    policy = learned(program)
    assert len(policy.outline.calls) == 3

    def without_looks(x: Tensor) -> Tensor:
        return program(x, looks=False)

    _, num_watched, _ = quietly(without_looks, policy)
    assert num_watched == 1


def test_attention_of_torch_and_blocks_of_code_are_always_watched() -> None:
    policy = policy_of(chain)
    tape = Tape(policy)
    assert learner_for(policy, tape, None) is None
    assert learner_for(policy, tape, nn.TransformerEncoderLayer(8, 2)) is None
    assert learner_for(policy, tape, nn.Linear(2, 2)) is None  # after one refusal nobody asks again


def test_steps_learn_and_then_run_quietly_and_an_error_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model, twin = network(), network()
    twin.load_state_dict(model.state_dict())
    at_floor(model)
    x = torch.randn(16, SIZE)
    depths: list[int] = []
    model[5].register_forward_hook(lambda *_: depths.append(_len_torch_function_stack()))
    for _ in range(4):
        for one in (model, twin):
            one(x).pow(2).mean().backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))
        assert_clean()
    assert depths == [0, 1, 1, 1]  # recorded, learned, quiet, quiet

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model[8].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    assert_clean()
    handle.remove()
    for one in (model, twin):
        one(x).pow(2).mean().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))
