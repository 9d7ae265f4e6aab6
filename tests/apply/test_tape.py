"""A tape around small programs: what is kept, what is made again and how often, and what it costs in memory."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.steps import record
from torchecho.apply.policy import FOLLOW, KEEP, WRITE, Policy
from torchecho.apply.tape import Packed, Tape, stash, unstash
from torchecho.errors import RecomputeError

ATEN = torch.ops.aten
Program = Callable[[Tensor, nn.Parameter], Tensor]


def given() -> tuple[Tensor, nn.Parameter]:
    """Return an input and a weight, the same each time."""
    torch.manual_seed(0)
    return torch.randn(4, 16), nn.Parameter(torch.randn(16, 16) * 0.3)


def policy_of(program: Program, windows: dict[Any, int]) -> Policy:
    """Return the policy that decides alike about every call of some operators: by a window, or to follow."""
    recording = record(program, *given(), num_backwards=0)
    decisions = [windows.get(c.func, WRITE if c.func._schema.is_mutable else KEEP) for c in recording.calls]
    return Policy(tuple(c.func for c in recording.calls), tuple(decisions), tuple(c.place for c in recording.calls))


def forward(program: Program, policy: Policy, tape: Tape | None = None) -> tuple[Tensor, nn.Parameter, Tape]:
    """Run a program under a policy; return its loss, its weight and the tape."""
    tape = tape or Tape(policy)
    x, w = given()
    with tape, torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack):
        loss = program(x, w)
    tape.end_forward()
    return loss, w, tape


def step(program: Program, windows: dict[Any, int]) -> Tape:
    """Do a step and check the gradient against that of plain PyTorch; return the tape."""
    loss, w, tape = forward(program, policy_of(program, windows))
    tape.start_backward(keeps_graph=False)
    loss.backward()
    x, plain = given()
    program(x, plain).backward()
    assert torch.equal(w.grad, plain.grad)
    return tape


def chain(x: Tensor, w: nn.Parameter) -> Tensor:
    """Three saved results, one made of the other."""
    return torch.sigmoid(torch.exp(torch.tanh(x @ w))).sum()


def test_each_call_is_made_again_once() -> None:
    # The backward needs sigmoid, then exp, then tanh: with one copy of each, all are made before the first.
    everything = {ATEN.tanh.default: 0, ATEN.exp.default: 0, ATEN.sigmoid.default: 0}
    assert step(chain, everything).num_recomputed == 3


def test_windows_make_copies() -> None:
    # Nodes come in the order sigmoid, exp, tanh. exp is needed at the first two, which are one apart: one copy. tanh is
    # needed at the first, where exp is made, and at the last: two apart, two copies.
    assert step(chain, {ATEN.tanh.default: 1, ATEN.exp.default: 1, ATEN.sigmoid.default: 1}).num_recomputed == 4


def test_nothing_is_made_again_without_recipes() -> None:
    assert step(chain, {}).num_recomputed == 0


def test_recomputed_storages_die_in_the_forward() -> None:
    alive: list[weakref.ref[Any]] = []

    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = torch.tanh(x @ w)
        alive.append(weakref.ref(y.untyped_storage()))
        return y.exp().sum()

    policy = policy_of(program, {ATEN.tanh.default: 0})
    alive.clear()
    loss, w, tape = forward(program, policy)
    assert alive[0]() is None
    tape.start_backward(keeps_graph=False)
    loss.backward()
    x, plain = given()
    program(x, plain).backward()
    assert alive[1]() is None
    assert torch.equal(w.grad, plain.grad)


def test_saved_views_are_made_of_the_storage() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = torch.tanh(x @ w)
        return (y.t()[2:5] * y[:3].t()[:3, :1].expand(3, 4)).sum()

    assert step(program, {ATEN.tanh.default: 0}).num_recomputed == 1


@pytest.mark.parametrize(
    "view",
    [
        lambda z: z.conj() * 2,
        lambda z: torch.view_as_real(z).tanh(),
        lambda z: z.conj().imag[1:] * z.real[:-1],
        lambda z: z.conj().t()[2:5] @ z,
    ],
)
def test_saved_views_of_another_form_are_made_of_the_storage(view: Callable[[Tensor], Tensor]) -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        made = view(torch.view_as_complex((x @ w).view(4, 8, 2)).exp())
        return made.abs().pow(2).sum()

    assert step(program, {ATEN.exp.default: 0}).num_recomputed == 1


def test_no_view_of_another_form_keeps_a_storage() -> None:
    """The conjugate is all that the backward of the product needs of exp."""
    made: list[Any] = []

    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        z = torch.view_as_complex((x @ w).view(4, 8, 2)).exp()
        made.append(weakref.ref(z.untyped_storage()))
        return torch.view_as_real(z.conj() * w[:4, :8]).sum()

    loss, _, _ = forward(program, policy_of(program, {ATEN.exp.default: 0}))
    assert made[-1]() is None
    assert loss.grad_fn is not None


def test_what_is_read_is_made_before_it_is_changed() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        state = torch.zeros(4, 16)
        y = torch.tanh((x @ w) * 1.0 + state)
        y = torch.sin(y + torch.cos(state))
        state.add_(1.0)
        return (y * state).sum()

    assert step(program, {ATEN.cos.default: 0, ATEN.add.Tensor: 0, ATEN.tanh.default: 0}).num_recomputed == 4


def test_what_was_changed_is_kept_as_it_is() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = (x @ w) * 2.0
        y[:, :3].add_(1.0)
        return torch.tanh(y).exp().sum()

    # The tangent and the exponential, of what the product by two is after the change.
    assert step(program, {ATEN.mul.Tensor: 0, ATEN.tanh.default: 0, ATEN.exp.default: 0}).num_recomputed == 2


def test_changes_are_made_again_on_the_copy() -> None:
    alive: list[weakref.ref[Any]] = []

    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = x @ w
        y += torch.cos(x)
        torch.relu_(y)
        alive.append(weakref.ref(y.untyped_storage()))
        return y.exp().sum()

    together = {ATEN.mm.default: 0, ATEN.add_.Tensor: FOLLOW, ATEN.relu_.default: FOLLOW, ATEN.exp.default: 0}
    policy = policy_of(program, together)
    alive.clear()
    loss, w, tape = forward(program, policy)
    assert alive[0]() is None
    tape.start_backward(keeps_graph=False)
    loss.backward()
    x, plain = given()
    program(x, plain).backward()
    assert torch.equal(w.grad, plain.grad)
    assert tape.num_recomputed == 2
    # The term is made after the product and before the sum: it can be made again, too.
    assert step(program, together | {ATEN.cos.default: 0}).num_recomputed == 3


def test_what_a_change_reads_may_be_another_part_of_the_same() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        a, b, c = (x @ w)[:, :15].unsafe_chunk(3, 1)
        torch.sigmoid_(a)
        torch.tanh_(b)
        c.mul_(a.detach())
        return ((a * b).exp() * c).sum()

    writers = {ATEN.sigmoid_.default: FOLLOW, ATEN.tanh_.default: FOLLOW, ATEN.mul_.Tensor: FOLLOW}
    assert step(program, {ATEN.mm.default: 0} | writers).num_recomputed == 1


def test_what_is_read_in_the_middle_is_made_again_with_it() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = x @ w
        y.mul_(torch.sigmoid(y))
        return y.exp().sum()

    middle = {ATEN.sigmoid.default: FOLLOW, ATEN.clone.default: FOLLOW, ATEN.mul_.Tensor: FOLLOW}
    assert step(program, {ATEN.mm.default: 0} | middle).num_recomputed == 1


@pytest.mark.parametrize("reader", [ATEN.cosh.default, ATEN.sinh.default])
def test_change_after_another_recipe_has_read_is_not_made_again(reader: Any) -> None:
    """A step that differs from the planned one: the reader needs what was there before the change."""

    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = x @ w.detach()
        early = reader(y)
        y.add_(1.0)
        return ((w.sum() * early) * (y.exp() * w.sum())).sum()

    windows = {ATEN.mm.default: 0, reader: 0, ATEN.add_.Tensor: FOLLOW, ATEN.exp.default: 0}
    # The reader is made again of the product as it was; the sum is held as it is.
    assert step(program, windows).num_recomputed == 3


def test_change_of_what_is_saved_is_no_follow_up() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = torch.tanh(x @ w)
        y.data.add_(1.0)
        return y.sum()

    held = forward(program, policy_of(program, {ATEN.tanh.default: 0, ATEN.add_.Tensor: FOLLOW}))
    (packed,) = held[-1]._alive()
    assert packed.part.recipe.follow_ups == []


def test_what_a_change_reads_is_changed_later() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        state = torch.ones(4, 16)
        y = x @ w
        y.add_(state)
        state.zero_()
        return (y.exp() * state.cos()).sum()

    windows = {ATEN.mm.default: 0, ATEN.add_.Tensor: FOLLOW, ATEN.exp.default: 0}
    # The product with what is added to it, before that is set to zero; the exponential in the backward.
    assert step(program, windows).num_recomputed == 2


def test_results_that_are_handed_through_are_never_changed_by_a_copy() -> None:
    """A call that returns what it was given makes nothing: its recipe must not write to that."""

    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = x.cos()
        z = ATEN.lift_fresh.default(y)
        z.add_(1.0)
        return (z @ w).exp().sum() + y.sum()

    assert step(program, {ATEN.lift_fresh.default: 0, ATEN.add_.Tensor: FOLLOW}).num_recomputed == 0


def test_graph_is_used_twice_at_twice_the_work() -> None:
    loss, w, tape = forward(chain, policy_of(chain, {ATEN.tanh.default: 0, ATEN.exp.default: 0}))
    tape.start_backward(keeps_graph=True)
    loss.backward(retain_graph=True)
    assert tape.num_recomputed == 2
    tape.start_backward(keeps_graph=False)
    loss.backward()
    assert tape.num_recomputed == 4
    x, plain = given()
    once = chain(x, plain)
    once.backward(retain_graph=True)
    once.backward()
    assert torch.equal(w.grad, plain.grad)


class Twice(torch.autograd.Function):
    """Asks twice for what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert ctx.saved_tensors[0] is not None
        return 2 * x * grad


def test_custom_function_that_asks_twice_is_served_once() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = torch.tanh(x @ w)
        return torch.sin(Twice.apply(y)).sum() + y.cos().sum()

    assert step(program, {ATEN.tanh.default: 0}).num_recomputed == 1


def test_losses_that_share_what_was_made_again() -> None:
    """The backward of one loss runs nodes between those of the other."""
    parts: list[Tensor] = []

    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        shared = torch.tanh(x @ w.detach())
        one = torch.sin((shared * w.sum()).cos())
        other = torch.sin((shared * w.sum()).cos()) * shared
        one = one * shared
        parts[:] = [one.sum(), other.sum()]
        return parts[0]

    policy = policy_of(program, {ATEN.tanh.default: 1})
    for order in ([0, 1], [1, 0]):
        _, w, tape = forward(program, policy)
        for index in order:
            tape.start_backward(keeps_graph=False)
            parts[index].backward()
        x, plain = given()
        program(x, plain)
        for index in order:
            parts[index].backward()
        assert torch.equal(w.grad, plain.grad)


def test_recipes_die_with_the_graph_though_the_program_keeps_what_they_made() -> None:
    kept: list[Tensor] = []

    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = torch.tanh(x @ w)
        kept.append(y.detach())
        return y.exp().sum()

    loss, _, tape = forward(program, policy_of(program, {ATEN.tanh.default: 0, ATEN.exp.default: 0}))
    recipes = [weakref.ref(packed.part.recipe) for packed in tape._alive()]
    assert len(recipes) == 2
    del loss
    assert [reference() for reference in recipes] == [None, None]


def test_hooks_of_the_program_keep_what_no_recipe_stands_for() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return kept[-1]

    tape = Tape(policy_of(chain, {ATEN.exp.default: 0}), keep, lambda tensor: tensor)
    forward(chain, Policy((), (), ()), tape)
    x, w = given()
    tanh = torch.tanh(x @ w).detach()
    saved = [tensor for tensor in kept if tensor.shape == tanh.shape]
    # x for the weight, tanh for its backward, sigmoid for its own; exp has a recipe.
    assert [torch.equal(a, b) for a, b in zip(saved, [x, tanh, tanh.exp().sigmoid()], strict=True)] == [True] * 3


def test_stash_notices_changes_in_place() -> None:
    x = torch.randn(3, requires_grad=True) * 2
    kept = stash(x)
    assert kept.tensor.data_ptr() == x.data_ptr()
    assert kept.tensor.grad_fn is None
    assert torch.equal(unstash(kept), x)
    x.detach().add_(1)
    with pytest.raises(RecomputeError, match="modified by an inplace operation"):
        unstash(kept)


def test_packed_is_not_the_tensor() -> None:
    tape = Tape(policy_of(chain, {ATEN.tanh.default: 0}))
    packed: list[Any] = []
    x, w = given()

    def pack(tensor: Tensor) -> Any:
        packed.append(tape.pack(tensor))
        return packed[-1]

    with tape, torch.autograd.graph.saved_tensors_hooks(pack, tape.unpack):
        chain(x, w)
    assert sum(type(one) is Packed for one in packed) == 1
