"""Backward ops write over operands that nobody reads any more: as counted by hand, and with the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture.joint import Scheduled, capture
from tests.end_to_end.models import CASES
from tests.end_to_end.steps import differences, run_step
from tests.graphs import base_schedule
from tests.verify import verify_graph, verify_schedule
from torchecho.capture.fx import JointCapture
from torchecho.ir.graph import Category
from torchecho.simulate.replay import live_bytes, replay_tables


def leaf(*shape: int) -> Tensor:
    """Return an input that wants a gradient."""
    return torch.randn(*shape, requires_grad=True)


def written_over(captured: JointCapture) -> dict[str, int]:
    """Return the ops that write over an operand, and the place of the operand."""
    return {captured.graph.ops[i].name: way.operand for i, way in captured.in_place.items()}


def live(captured: JointCapture) -> list[int]:
    """Return the live bytes of each step of the untouched schedule."""
    tables = replay_tables(captured.graph, [0] * len(captured.graph.ops))
    return [int(n) for n in live_bytes(tables, base_schedule(captured.graph))]


def used_twice(x: Tensor) -> Tensor:
    """Use one value twice: its gradient is a sum."""
    a = x.exp()
    return (a.sin() + a.cos()).sum()


# 16 numbers of 4 bytes make 64. Live throughout: x 64. Forward: exp a; + sin; + cos; + their sum; sin, cos die, loss.
FORWARD = [64 + 64, 64 + 128, 64 + 192, 64 + 256, 64 + 128 + 4]
# In the backward x, a, loss and its tangent: 64 + 64 + 4 + 4.
STASH = 136


def test_the_peak_without_writing_over_operands_by_hand() -> None:
    captured = capture(used_twice, leaf(4, 4))
    # sin(a); neg beside it; their product beside neg; cos(a) beside the product; its product beside both; the sum
    # beside both products; the gradient beside the sum and a
    assert live(captured) == FORWARD + [STASH + 64 * n for n in (1, 2, 2, 2, 3, 3, 2)]
    assert captured.in_place == {}


def test_the_peak_with_writing_over_operands_by_hand() -> None:
    captured = capture(used_twice, leaf(4, 4), in_place=True)
    # sin(a); neg beside it, and the product in its place; cos(a) beside the product, its product in its place; the sum
    # in the place of the first product, still beside the second; the gradient in the place of the sum
    assert live(captured) == FORWARD + [STASH + 64 * n for n in (1, 2, 1, 2, 2, 2, 1)]
    assert written_over(captured) == {"mul": 1, "mul_1": 1, "add_1": 0, "mul_2": 0}
    verify_graph(captured.graph)
    verify_schedule(captured.graph, base_schedule(captured.graph))


def test_the_storage_that_is_written_over_becomes_the_gradient() -> None:
    captured = capture(used_twice, leaf(4, 4), in_place=True)
    gradients = [s for s in captured.graph.storages if s.category == Category.GRADIENT]
    assert [(s.name, s.held, s.size_bytes) for s in gradients] == [("neg", True, 64)]


def test_a_gradient_that_is_handed_out_is_never_written_over() -> None:
    captured = capture(lambda x, w: (x + w.exp()).sin().sum(), leaf(4, 4), leaf(4, 4), in_place=True)
    # cos is overwritten by the gradient of x, which the gradient of w reads and must leave alone
    assert written_over(captured) == {"mul": 1}


class Doubtful(torch.autograd.Function):
    """A function whose backward is given: `derive(gradient, x)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, derive: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return x."""
        ctx.save_for_backward(x)
        ctx.derive = derive
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Derive as given."""
        return ctx.derive(gradients[0], *ctx.saved_tensors), None


def with_backward(derive: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a model with the backward `derive`, of the incoming gradient and x."""
    return lambda x: Doubtful.apply(x, derive).sin().sum()


def read_later(gradient: Tensor, x: Tensor) -> Tensor:
    """Read `a` in the addition and once more after it."""
    a, b = gradient.exp(), x.exp()
    return torch.add(a, b) / a


def scaled_second(gradient: Tensor, x: Tensor) -> Tensor:
    """Add three times what could be overwritten: the operands of the addition cannot change places."""
    a, b = gradient.exp(), x.exp()
    return torch.add(a, b, alpha=3) / a


def promoted(gradient: Tensor, x: Tensor) -> Tensor:
    """Multiply 16 bits by 32: the result does not fit where the operand is."""
    return gradient.exp().bfloat16() * x


def expanded(gradient: Tensor, x: Tensor) -> Tensor:
    """Multiply a row that looks like a matrix."""
    return gradient.exp().sum(0, keepdim=True).expand(4, 4) * x


def seen_twice(gradient: Tensor, x: Tensor) -> Tensor:
    """Multiply a value by another view of itself."""
    a = gradient.exp() + x.exp()
    return a * a.t()


def transposed(gradient: Tensor, x: Tensor) -> Tensor:
    """Multiply a value that lies otherwise than the result."""
    return x * gradient.exp().t()


DERIVATIVES = {f.__name__: f for f in (read_later, scaled_second, promoted, expanded, seen_twice, transposed)}


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        # div, the last to read `a` and the first to be allowed to write, is over the sum
        ("read_later", {"add": 1, "div": 0}),
        ("scaled_second", {"div": 0}),
        ("promoted", {}),
        ("expanded", {}),
        ("seen_twice", {"add": 0}),
        ("transposed", {}),
    ],
)
def test_only_what_is_free_and_looks_alike_is_written_over(name: str, ops: dict[str, int]) -> None:
    captured = capture(with_backward(DERIVATIVES[name]), leaf(4, 4), in_place=True)
    found = written_over(captured)
    assert found.pop("mul") == 1  # the gradient of sin, over the cosine
    assert found == ops


def gradients_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the gradient of x."""
    (gradient,) = torch.autograd.grad(model(x), x)
    return gradient


@pytest.mark.parametrize("name", DERIVATIVES)
def test_awkward_backwards_give_the_bits_of_eager(name: str) -> None:
    model, x = with_backward(DERIVATIVES[name]), leaf(4, 4)
    planned = Scheduled(model, lambda captured: base_schedule(captured.graph), in_place=True)
    assert torch.equal(gradients_of(planned, x), gradients_of(model, x))
    assert planned.captured.in_place


@pytest.mark.parametrize("name", ["perceptron", "attention", "cell loop", "views", "tied"])
def test_a_step_is_the_same_with_and_without(name: str) -> None:
    left, ways = [], []
    for in_place in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, inputs = CASES[name].build(), CASES[name].inputs()
        run = Scheduled(model, lambda captured: base_schedule(captured.graph), in_place=in_place)
        left.append(run_step(run, inputs, model))
        ways.append(len(run.captured.in_place))
    assert differences(*left) == []
    assert ways[0] == 0 < ways[1]
