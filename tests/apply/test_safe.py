"""A step that no plan knows yet: what it makes again, counted by hand."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchecho.apply.safe import SafeTape

_RESULT_BYTES = 4 * 16 * 4


def _loss(x: Tensor, w: nn.Parameter) -> Tensor:
    return torch.tanh(torch.tanh(x @ w) * 2).sum()


def _given() -> tuple[Tensor, nn.Parameter]:
    torch.manual_seed(0)
    return torch.randn(4, 16), nn.Parameter(torch.randn(16, 16))


# Both hyperbolic tangents are asked for, two nodes apart: the outer one first, by way of the product, the inner one
# and the doubling. Where a result takes a sixteenth of the budget, the inner one and what it needs run again for it.
@pytest.mark.parametrize(
    ("budget_bytes", "num_recomputed"),
    [(None, 4), (16 * _RESULT_BYTES + 1, 4), (16 * _RESULT_BYTES, 6)],
    ids=["no budget", "small results", "large results"],
)
def test_what_takes_much_of_the_budget_is_made_for_each_use(budget_bytes: int | None, num_recomputed: int) -> None:
    assert _num_recomputed(_loss, budget_bytes) == num_recomputed


def _num_recomputed(program: Callable[[Tensor, nn.Parameter], Tensor], budget_bytes: int | None = None) -> int:
    """Return how many recipes are made in a step without a plan, which gives the bits of plain PyTorch."""
    x, w = _given()
    program(x, w).backward()
    expected, w.grad = w.grad, None
    tape = SafeTape([x], budget_bytes=budget_bytes)
    with torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack), tape:
        loss = program(x, w)
    tape.end_forward()
    tape.start_backward(keeps_graph=False)
    loss.backward()
    assert expected is not None
    assert w.grad is not None
    assert torch.equal(w.grad, expected)
    return tape.num_recomputed


def _many_changes(x: Tensor, w: nn.Parameter) -> Tensor:
    made = x @ w
    for _ in range(16):
        made += x
    return made.sin().sum()


def _changed_by_a_draw(x: Tensor, w: nn.Parameter) -> Tensor:
    torch.manual_seed(1)
    made = x @ w
    made += torch.rand_like(made)
    return made.sin().sum()


@pytest.mark.parametrize(
    ("program", "num_recomputed"),
    [
        (lambda x, w: torch.tanh(F.relu_(x @ w) @ w).sum(), 3),  # each product, and the hyperbolic tangent
        (lambda x, w: (x @ w).mul_(torch.tanh(x @ w)).sin().sum(), 4),  # factors and a clone of the first; it is read
        (_many_changes, 0),  # too deep
        (_changed_by_a_draw, 0),  # holds what is not kept anyway
    ],
    ids=["chain", "read before", "many", "drawn"],
)
def test_changes_in_place_belong_to_what_they_change(
    program: Callable[[Tensor, nn.Parameter], Tensor], num_recomputed: int
) -> None:
    assert _num_recomputed(program) == num_recomputed
