"""Two twins of a program, one of them under the eager engine at its floor, and whether the engine leaves no trace."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack

import torchecho
from torchecho.engine import boundaries, scope

BACKWARD, GRAD = torch.autograd.backward, torch.autograd.grad
STEPS = 3
SIZE = 32


def network(layers: int = 4) -> nn.Sequential:
    """Return a network whose plan recomputes most of its feature maps."""
    made: list[nn.Module] = []
    for _ in range(layers):
        made += [nn.Linear(SIZE, SIZE), nn.Tanh(), nn.LayerNorm(SIZE)]
    return nn.Sequential(*made)


def at_floor(model: nn.Module) -> nn.Module:
    """Optimize a model for the smallest peak."""
    return torchecho.optimize(model, engine="eager", strict=True, max_slowdown=100.0, cost="roofline")


def untouched(model: nn.Module) -> nn.Module:
    """Return a model as it is."""
    return model


Prepare = Callable[[nn.Module], nn.Module]
Scenario = Callable[[Prepare], list[Tensor | None]]


def run(scenario: Scenario, prepare: Prepare) -> list[Tensor | None]:
    """Run a scenario from given random numbers, and keep what it returns."""
    torch.manual_seed(0)
    return [None if made is None else made.detach().clone() for made in scenario(prepare)]


def assert_same(scenario: Scenario, *, recomputes: bool = True) -> None:
    """Check that a scenario gives the bits of plain PyTorch, whether it recomputes, and that it leaves no trace."""
    expected = run(scenario, untouched)
    count = len(torchecho.plans())
    found = run(scenario, at_floor)
    assert any(plan.num_recomputed for plan in torchecho.plans()[count:]) == recomputes
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert_clean()


def assert_clean() -> None:
    """Check that torch's functions are its own, and that no mode and no hook is active."""
    assert torch.autograd.backward is BACKWARD
    assert torch.autograd.grad is GRAD
    assert boundaries.listener() is None
    assert scope.num_modes() == 0
    assert _len_torch_function_stack() == 0
    assert scope.outer_hooks() is None


def gradients(*models: nn.Module) -> list[Tensor | None]:
    """Return the gradients of models, and take them away."""
    found = [parameter.grad for model in models for parameter in model.parameters()]
    for model in models:
        model.zero_grad(set_to_none=True)
    return found


def batch() -> Tensor:
    """Return a random batch."""
    return torch.randn(64, SIZE)
