"""Ways to train a program for one step, and everything that it leaves behind."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from tests.end_to_end.programs import B, H, Runner

Train = Callable[[Runner, Tensor], Tensor]
Left = dict[str, Tensor | None]


def backward(runner: Runner, x: Tensor) -> Tensor:
    loss = runner(x)
    loss.backward()
    return loss


def retained(runner: Runner, x: Tensor) -> Tensor:
    loss = runner(x)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def accumulated(runner: Runner, x: Tensor) -> Tensor:
    runner(x * 0.5).backward()
    return backward(runner, x)


def asked(runner: Runner, x: Tensor) -> Tensor:
    """Ask for some of the gradients only."""
    loss = runner(x)
    some = [p for i, p in enumerate(runner.parameters()) if i % 2 and p.requires_grad]
    for parameter, grad in zip(some, torch.autograd.grad(loss, some, allow_unused=True), strict=True):
        parameter.grad = grad
    return loss


def doubled(runner: Runner, x: Tensor) -> Tensor:
    """Penalise the gradient: a backward through the backward."""
    loss = runner(x)
    some = [runner.layers[0].weight, runner.layers[1].weight]
    grads = torch.autograd.grad(loss, some, create_graph=True, allow_unused=True)
    (loss + sum(grad.pow(2).sum() for grad in grads if grad is not None)).backward()
    return loss


def two_losses(runner: Runner, x: Tensor) -> Tensor:
    first = runner(x)
    second = runner(x.flip(0))
    (first * 0.5).backward()
    second.backward()
    return first + second


def stepped_between(runner: Runner, x: Tensor) -> Tensor:
    """Change what the forward has read between two backwards of it."""
    loss = runner(x)
    late = (torch.tanh(runner.layers[0](x)).detach() * runner.norm.weight).sum()
    loss.backward()
    with torch.no_grad():
        runner.layers[0].weight.mul_(0.9)
    late.backward()
    return loss + late


TRAININGS: dict[str, Train] = {
    f.__name__: f for f in (backward, retained, accumulated, asked, doubled, two_losses, stepped_between)
}


def run_steps(runner: Runner, num_steps: int, first: int = 0) -> list[Left]:
    """Train for some steps and return what each left: loss, gradients, buffers, random state, hooks that fired."""
    return [run_step(runner, step) for step in range(first, first + num_steps)]


def run_step(runner: Runner, step: int) -> Left:
    """Train for one step from given random numbers."""
    torch.manual_seed(step)
    random.seed(step)
    x = torch.randn(B, H, requires_grad=runner.program.input_needs_gradient)
    runner.zero_grad(set_to_none=True)
    loss = TRAININGS[runner.program.training](runner, x)
    left: Left = {"loss": loss.detach().clone(), "rng": torch.get_rng_state(), "input": x.grad}
    left["python rng"] = torch.tensor(random.random(), dtype=torch.double)
    left["hooks"] = torch.tensor(runner.num_hooks)
    left |= {f"grad {name}": None if p.grad is None else p.grad.clone() for name, p in runner.named_parameters()}
    left |= {f"buffer {name}": b.clone() for name, b in runner.named_buffers()}
    return left


def changed(expected: Left, found: Left) -> list[str]:
    """Return the names of what is not the same to the last bit, NaNs and signs of zeros included."""
    assert expected.keys() == found.keys()
    return [name for name in expected if _bits(expected[name]) != _bits(found[name])]


def _bits(tensor: Tensor | None) -> tuple[torch.dtype, torch.Size, bytes] | None:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.numpy().tobytes())
