"""Formulas of autograd that are others under a dispatch mode: the recorded step has the bits of the unrecorded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchecho
from tests.engine.eager_steps import SIZE, STEPS, assert_clean, at_floor, batch, gradients, untouched

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x.prod(),
    "products": lambda x: x.unfold(1, 3, 1).prod(-1).sum(),
    "products so far": lambda x: x.cumprod(1).sum(),
    "largest": lambda x: x.max(),
    "smallest": lambda x: x.min(),
    "median": lambda x: x.median(),
    "largest of rows": lambda x: x.max(1).values.sum(),
    "median of rows": lambda x: x.median(1).values.sum(),
    "nanmedian of rows": lambda x: x.nanmedian(1).values.sum(),
    "sorted": lambda x: (x.sort(1).values * x).sum(),
    "topk": lambda x: x.topk(SIZE // 2, 1).values.sum(),
    "kth value": lambda x: x.kthvalue(3, 1).values.sum(),
    "mode": lambda x: x.mode(1).values.sum(),
    "largest so far": lambda x: x.cummax(1).values.sum(),
    "smallest so far": lambda x: x.cummin(1).values.sum(),
    "indexed": lambda x: x[torch.arange(40) % 7].sum(),
    "rows": lambda x: x.index_select(0, torch.arange(40) % 7).sum(),
    "gathered": lambda x: x.gather(1, torch.zeros(64, SIZE // 2, dtype=torch.long)).sum(),
    "taken": lambda x: x.take(torch.arange(100)).sum(),
    "put": lambda x: x.put(torch.arange(5), x[0, :5]).sum(),
    "scattered": lambda x: x.masked_scatter(torch.ones_like(x).tril() > 0, x * 2).sum(),
    "filled": lambda x: x.masked_fill(x > 0.1, x.mean()).sin().sum(),
    "trace": lambda x: x.trace(),
    "clamped": lambda x: x.clamp(-0.5, 0.5).sum(),
    "renormalised": lambda x: x.renorm(2, 0, 1.0).sum(),
    "eigenvalues": lambda x: torch.linalg.eig(x[:SIZE] + torch.eye(SIZE)).eigenvalues.abs().sum(),
    "least squares": lambda x: torch.linalg.lstsq(x, x.cos()).solution.sum(),
    "householder": lambda x: torch.linalg.householder_product(x, torch.full((SIZE,), 1 / SIZE)).sum(),
}


class Model(nn.Module):
    """A layer and a formula."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.formula = nn.Linear(SIZE, SIZE), formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(torch.tanh(self.layer(x)))


def _at_measured_floor(model: nn.Module) -> nn.Module:
    """Optimize a model for the smallest peak; the memory that its ops take inside is measured."""
    return torchecho.optimize(model, engine="eager", strict=True, max_slowdown=100.0)


@pytest.mark.parametrize("name", FORMULAS)
def test_recorded_steps_have_the_bits_and_the_peak_of_others(name: str) -> None:
    found = []
    for prepare in (untouched, _at_measured_floor):
        torch.manual_seed(0)
        model = prepare(Model(FORMULAS[name]))
        kept: list[Tensor | None] = []
        for _ in range(STEPS):
            loss = model(batch())
            loss.backward(retain_graph=True)
            loss.backward()
            kept += gradients(model)
            del loss
        found.append(kept)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torchecho.plans()[-1].measured_peak_bytes == torchecho.plans()[-1].predicted_peak_bytes
    assert_clean()


class _Nothing(torch.autograd.Function):
    """Hands a value on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def test_such_a_node_without_a_gradient_is_passed_over() -> None:
    model = at_floor(Model(lambda x: _Nothing.apply(x.sort(1).values).sum() + x.sum()))
    for _ in range(2):
        model(batch()).backward()
    assert all(grad is not None for grad in gradients(model))
    assert_clean()


def test_an_error_in_such_a_node_leaves_nothing_behind() -> None:
    def formula(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: 1 / 0)
        return x.prod()

    model = at_floor(Model(formula))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(batch()).backward()
        assert_clean()
