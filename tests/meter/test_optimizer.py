"""The bytes of an optimizer against hand counts and against its real step."""

import pytest
import torch
from torch import nn

from torchecho.meter.optimizer import OptimizerBytes, optimizer_bytes
from torchecho.meter.probe import PeakProbe

FLOAT = 4


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8))


def _filled(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)


def test_adam_keeps_two_averages_and_a_counter_for_each_parameter() -> None:
    model = _model()
    found = optimizer_bytes(torch.optim.Adam(model.parameters()))
    weights = sum(p.nbytes for p in model.parameters())
    assert found.state_bytes == 2 * weights + FLOAT * len(list(model.parameters()))


def test_plain_sgd_keeps_nothing() -> None:
    assert optimizer_bytes(torch.optim.SGD(_model().parameters(), lr=0.1)) == OptimizerBytes(0, 0)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_later_step_allocates_what_was_foreseen(kind: type[torch.optim.Optimizer]) -> None:
    model = _model()
    optimizer = kind(model.parameters())
    foreseen = optimizer_bytes(optimizer)
    for _ in range(2):
        _filled(model)
        optimizer.step()
    assert optimizer_bytes(optimizer) == foreseen
    _filled(model)
    with PeakProbe("cpu") as probe:
        optimizer.step()
        used = probe.read()
    largest = max(p.nbytes for p in model.parameters())
    assert foreseen.step_bytes >= largest
    # Scalars that PyTorch wraps into tensors are made below the level at which the copy is watched.
    assert 0 <= used - foreseen.step_bytes < 64


def test_an_optimizer_that_cannot_step_counts_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            raise RuntimeError("only on Tuesdays")

    assert optimizer_bytes(Odd(_model().parameters(), lr=0.1)) == OptimizerBytes(0, 0)
    assert "cannot foresee the steps of Odd" in caplog.text


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adam, torch.optim.Adagrad])
def test_state_of_a_parameter_with_one_number_keeps_its_shape(kind, caplog) -> None:
    model = nn.Linear(4, 1)
    optimizer = kind(model.parameters())
    before = optimizer_bytes(optimizer)
    _filled(model)
    optimizer.step()
    assert optimizer_bytes(optimizer) == before
    assert not caplog.records
