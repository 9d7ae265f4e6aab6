"""A step that no plan knows yet: what it makes again, counted by hand."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchecho.apply.safe import SafeTape

_RESULT_BYTES = 4 * 16 * 4


def _loss(x: Tensor, w: nn.Parameter) -> Tensor:
    return torch.tanh(torch.tanh(x @ w) * 2).sum()


def _given() -> tuple[Tensor, nn.Parameter]:
    torch.manual_seed(0)
    return torch.randn(4, 16), nn.Parameter(torch.randn(16, 16))


def _recomputed(tape: SafeTape, program: Callable[[], Tensor], w: nn.Parameter) -> int:
    """Run a program under a tape, with the bits of plain PyTorch, and return how many calls it made again."""
    program().backward()
    expected, w.grad = w.grad, None
    with torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack), tape:
        loss = program()
    tape.end_forward()
    tape.start_backward(keeps_graph=False)
    loss.backward()
    assert expected is not None
    assert w.grad is not None
    assert torch.equal(w.grad, expected)
    return tape.num_recomputed


# Both hyperbolic tangents are asked for, two nodes apart: the outer one first, by way of the product, the inner one
# and the doubling. Where a result takes a sixteenth of the budget, the inner one and what it needs run again for it.
@pytest.mark.parametrize(
    ("budget_bytes", "num_recomputed"),
    [(None, 4), (16 * _RESULT_BYTES + 1, 4), (16 * _RESULT_BYTES, 6)],
    ids=["no budget", "small results", "large results"],
)
def test_what_takes_much_of_the_budget_is_made_for_each_use(budget_bytes: int | None, num_recomputed: int) -> None:
    x, w = _given()
    tape = SafeTape([x], budget_bytes=budget_bytes)
    assert _recomputed(tape, lambda: _loss(x, w), w) == num_recomputed


def _reduced(x: Tensor, w: nn.Parameter, v: Tensor) -> Tensor:
    return torch.sigmoid(torch.tanh(x @ w) @ v).sum()


def _centred(x: Tensor, w: nn.Parameter, v: Tensor) -> Tensor:
    made = torch.tanh(x @ w)
    return (torch.exp(made - made.mean(1, keepdim=True)) @ v).sum()


# The sigmoid is asked for, then the hyperbolic tangent. Of 64 numbers the second product makes 4 or 8: with 4 it is not
# made again, so the sigmoid is kept, and only the first product and the tangent run. The mean of 16 numbers is not made
# again either, but held, so that what is made of it and of the tangent is: product, tangent, difference, exponential.
@pytest.mark.parametrize(
    ("program", "columns", "num_recomputed"),
    [(_reduced, 1, 2), (_reduced, 2, 4), (_centred, 2, 4)],
    ids=["small result", "larger result", "small operand"],
)
def test_what_is_small_beside_what_it_is_made_of_is_not_made_again(
    program: Callable[..., Tensor], columns: int, num_recomputed: int
) -> None:
    x, w = _given()
    v = torch.randn(16, columns)
    assert _recomputed(SafeTape([x, v]), lambda: program(x, w, v), w) == num_recomputed


def _rectified(x: Tensor, w: nn.Parameter, _: Tensor) -> Tensor:
    return torch.tanh((x @ w).relu_() * 2).sum()


def _shifted(x: Tensor, w: nn.Parameter, shift: Tensor) -> Tensor:
    return torch.tanh((x @ w).add_(shift) * 2).sum()


# Product and change in place are made again as one, then the doubling and the tangent. Where what is added would be
# held for that alone, nothing is: the sum is neither kept nor made again, so the tangent is kept. Where the change is
# of less than a 64th of the budget, the rectifier's result is kept, and doubling and tangent are made of it.
@pytest.mark.parametrize(
    ("program", "shift_is_given", "budget_bytes", "num_recomputed"),
    [
        (_rectified, False, 64 * _RESULT_BYTES, 3),
        (_rectified, False, 64 * _RESULT_BYTES + 1, 2),
        (_shifted, True, 64 * _RESULT_BYTES, 3),
        (_shifted, False, 64 * _RESULT_BYTES, 0),
    ],
    ids=["nothing else read", "of little", "what is there read", "something else read"],
)
def test_a_change_in_place_is_repeated_with_what_it_changes(
    program: Callable[..., Tensor], shift_is_given: bool, budget_bytes: int, num_recomputed: int
) -> None:
    x, w = _given()
    shift = torch.randn(4, 16)
    tape = SafeTape([x, shift] if shift_is_given else [x], budget_bytes=budget_bytes)
    assert _recomputed(tape, lambda: program(x, w, shift), w) == num_recomputed


def _changed(made: Tensor) -> None:
    made.data.mul_(2)


class _Calls(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.funcs: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.funcs.append(func)
        return func(*args, **(kwargs or {}))


# The hyperbolic tangent is asked for. Where the program still has it, nothing runs for it. Where the program has
# changed it behind autograd's back, what is saved is what it was: it is made again.
@pytest.mark.parametrize("is_changed", [False, True])
def test_what_the_program_still_holds_is_not_made_again(is_changed: bool) -> None:
    x, w = _given()
    tape, calls = SafeTape([x]), _Calls()
    with torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack), tape:
        held = torch.tanh(x @ w)
        loss = held.sum()
        if is_changed:
            held.data.mul_(2)
    tape.end_forward()
    tape.start_backward(keeps_graph=False)
    with calls:
        loss.backward()
    assert (torch.ops.aten.tanh.default in calls.funcs) == is_changed
    torch.testing.assert_close(w.grad, x.t() @ (1 - torch.tanh(x @ w).detach() ** 2))
