"""What is there when a step begins: buffers, and what the program still holds of the step before."""

import pytest
import torch
from torch import Tensor, nn

import torchecho
from tests.engine.eager_steps import SIZE, STEPS, batch, gradients

WIDTH = 256
RETURNED_BYTES = 64 * WIDTH * 4


class Model(nn.Module):
    """Returns much, and needs most memory in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(x)) + torch.rand(64, 16 * WIDTH).mean(1, keepdim=True))


def _step(model: nn.Module) -> Tensor:
    made = model(batch())
    made.sum().backward()
    gradients(model)
    return made


def _optimized(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return torchecho.optimize(Model(), engine="eager", strict=True, **options)


def _difference() -> int:
    plan = torchecho.plans()[-1]
    assert plan.measured_peak_bytes is not None
    return plan.predicted_peak_bytes - plan.measured_peak_bytes


def test_what_the_program_holds_of_the_step_before_is_foreseen() -> None:
    model = _optimized(max_slowdown=0.0)
    for _ in range(STEPS):
        made = _step(model)  # noqa: F841 - held until the model returns anew
    assert _difference() == 0


def test_what_the_program_lets_go_of_is_foreseen_all_the_same() -> None:
    model = _optimized(max_slowdown=0.0)
    for _ in range(STEPS):
        _step(model)
    assert _difference() == RETURNED_BYTES


def test_what_may_be_left_over_is_no_reason_to_refuse_a_budget() -> None:
    model = _optimized(max_slowdown=100.0)
    held = _step(model)
    floor_bytes = torchecho.plans()[-1].floor_bytes
    del held
    model = _optimized(memory_budget=floor_bytes - RETURNED_BYTES)
    for _ in range(STEPS):
        _step(model)
    assert torchecho.plans()[-1].measured_peak_bytes == floor_bytes - RETURNED_BYTES
    with pytest.raises(torchecho.BudgetError):
        _step(_optimized(memory_budget=floor_bytes - RETURNED_BYTES - 1))


def test_a_program_that_holds_what_it_had_no_room_for_is_told_to_let_go() -> None:
    model = _optimized(max_slowdown=100.0)
    held = _step(model)
    floor_bytes = torchecho.plans()[-1].floor_bytes
    model = _optimized(memory_budget=floor_bytes - RETURNED_BYTES)
    held = _step(model)
    with pytest.warns(torchecho.EchoWarning, match="fits if the program lets go of what the model returned"):
        held = _step(model)  # noqa: F841 - held until the model returns anew
    assert torchecho.plans()[-1].measured_peak_bytes == floor_bytes


class Cast(nn.Module):
    """Casts what it is given, and reads nothing else of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.layers(x.bfloat16().float())).mean()


def test_what_only_a_recipe_of_the_first_step_holds_is_not_taken_for_held() -> None:
    """A budget in bytes has the first step run with recipes, which hold the input; a plan of it has the same floor."""
    floors = []
    for options in ({"max_slowdown": 100.0}, {"memory_budget": "1GiB"}):
        torch.manual_seed(0)
        model = torchecho.optimize(Cast(), engine="eager", strict=True, **options)
        model(torch.randn(64, SIZE)).backward()
        floors.append(torchecho.plans()[-1].floor_bytes)
    assert floors[0] == floors[1]


class Buffers(nn.Module):
    """Reads a buffer, changes one, puts another in the place of one, and leaves one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        for name in ("read", "changed", "replaced", "idle"):
            self.register_buffer(name, torch.zeros(64, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.layer(x) + self.read + self.changed.add_(x) + self.replaced)
        self.replaced = made.detach()
        return torch.tanh(self.layer(made)).sum()


def test_buffers_are_counted_once() -> None:
    torch.manual_seed(0)
    model = Buffers()
    row_bytes = 64 * SIZE * 4
    parameter_bytes = 4 * (SIZE * SIZE + SIZE)
    torchecho.optimize(model, engine="eager", strict=True, max_slowdown=0.0)
    for _ in range(STEPS):
        model(batch()).backward()
        gradients(model)
    assert _difference() == 0
    # When the gradient of the bias is made a second time: x, three buffers and what took the place of the fourth, and a
    # gradient of it; the gradient of the weight twice and a third time added up; the loss, and what the backward
    # begins with.
    fixed = parameter_bytes + 5 * row_bytes + 2 * 4
    assert torchecho.plans()[-1].predicted_peak_bytes == fixed + row_bytes + 4 * (3 * SIZE * SIZE + SIZE)
