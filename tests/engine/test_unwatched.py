"""Formulas of autograd that are others under a dispatch mode: the recorded step has the bits of the unrecorded."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchecho
from tests.engine.eager_steps import SIZE, STEPS, assert_clean, at_floor, batch, gradients

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x.prod(),
    "products": lambda x: x.unfold(1, 3, 1).prod(-1).sum(),
    "products so far": lambda x: x.cumprod(1).sum(),
    "largest": lambda x: x.max(),
    "smallest": lambda x: x.min(),
    "median": lambda x: x.median(),
}


class Model(nn.Module):
    """A layer and a formula."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.formula = nn.Linear(SIZE, SIZE), formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(torch.tanh(self.layer(x)))


@pytest.mark.parametrize("name", FORMULAS)
def test_recorded_steps_have_the_bits_and_the_peak_of_others(name: str) -> None:
    found = []
    for prepare in (lambda model: model, at_floor):
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


def test_an_error_in_such_a_node_leaves_nothing_behind() -> None:
    def formula(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: 1 / 0)
        return x.prod()

    model = at_floor(Model(formula))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(batch()).backward()
        assert_clean()
