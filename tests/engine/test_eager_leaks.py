"""Nothing that a step takes outlives it: no tensor, also without the garbage collector, and no plan held by a loss."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.engine.eager_steps import SIZE, at_floor, batch, network
from torchecho.meter.probe import PeakProbe


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Program(nn.Module):
    """A network with a random draw, a write in place, a buffer that changes and a custom number of steps over time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.second = network(2), nn.GRUCell(SIZE, SIZE), network(2)
        self.register_buffer("count", torch.zeros(SIZE))

    def forward(self, x: Tensor, length: int) -> Tensor:
        x = nn.functional.dropout(self.first(x), 0.1)
        scale = torch.cos(self.count)
        self.count.add_(1.0)
        state = x * scale
        for _ in range(length):
            state = self.cell(x, state)
        made = torch.zeros_like(state)
        made[1:] = state[:-1]
        return self.second(made).pow(2).mean()


def _grown_bytes(model: nn.Module, lengths: list[int], kept: list[Tensor], *, backward: bool = True) -> int:
    with PeakProbe() as probe:
        for length in lengths:
            loss = model(batch(), length)
            if backward:
                loss.backward()
                model.zero_grad(set_to_none=True)
            kept.append(loss.detach())
            del loss
        return probe.kept_bytes


LOSS_BYTES = 4


@pytest.mark.parametrize("lengths", [[4], [4, 2, 3]])
@pytest.mark.usefixtures("without_collector")
def test_steps_keep_nothing(lengths: list[int]) -> None:
    model = at_floor(Program())
    kept: list[Tensor] = []
    _grown_bytes(model, lengths * 3, kept)
    assert _grown_bytes(model, lengths * 20, kept) == 20 * len(lengths) * LOSS_BYTES


@pytest.mark.usefixtures("without_collector")
def test_steps_without_a_backward_keep_nothing() -> None:
    model = at_floor(Program())
    kept: list[Tensor] = []
    _grown_bytes(model, [4] * 3, kept)
    assert _grown_bytes(model, [4] * 20, kept, backward=False) == 20 * LOSS_BYTES


@pytest.mark.usefixtures("without_collector")
def test_first_steps_without_a_backward_keep_nothing() -> None:
    model = at_floor(Program())
    kept: list[Tensor] = []
    assert _grown_bytes(model, [4] * 20, kept, backward=False) == 20 * LOSS_BYTES


@pytest.mark.usefixtures("without_collector")
def test_errors_keep_nothing() -> None:
    model = at_floor(Program())
    kept: list[Tensor] = []
    _grown_bytes(model, [4] * 3, kept)
    with PeakProbe() as probe:
        for _ in range(20):
            with pytest.raises(TypeError):
                model(batch(), None)
        assert probe.kept_bytes == 0
