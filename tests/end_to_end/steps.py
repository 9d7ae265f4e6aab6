"""Run one training step of a model and compare everything that it leaves behind, bit for bit."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import torchecho
from tests.end_to_end.models import Case
from torchecho.planner.plan import Plan

Left = dict[str, Tensor | None]


def prepare(case: Case, **options: object) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Build a case's model from a fixed seed and optimize it; no options: leave it as it is."""
    torch.manual_seed(0)
    model, inputs = case.build(), case.inputs()
    return (torchecho.optimize(model, **options) if options else model), inputs


def run_step(model: Callable[..., Tensor], inputs: tuple[Tensor, ...], module: nn.Module) -> Left:
    """Do one step and return loss, gradients, buffers and the state of the random numbers."""
    torch.manual_seed(1)
    loss = model(*inputs)
    loss.backward()
    left: Left = {"loss": loss.detach().clone(), "rng": torch.get_rng_state()}
    left |= {f"grad {name}": None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    left |= {f"buffer {name}": b.clone() for name, b in module.named_buffers()}
    return left


def differences(a: Left, b: Left) -> list[str]:
    """Return the names of what is not the same to the last bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not _same(a[name], b[name])]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def step_under(case: Case, **options: object) -> tuple[Left, Plan]:
    """Do a case's step in a fresh compile and return what it left, and its plan with the measured peak."""
    torch._dynamo.reset()
    model, inputs = prepare(case, lowering="eager", strict=True, **options)
    left = run_step(model, inputs, model)
    return copy.deepcopy(left), torchecho.plans()[-1]
