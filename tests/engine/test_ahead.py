"""The largest batch has its plan before any step has run."""

import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchecho
from tests.engine.eager_steps import SIZE, assert_clean, gradients, network
from torchecho.meter.probe import PeakProbe

LARGEST = 48


class Recurring(nn.Module):
    """A cell in a loop as long as the batch, and its loss; may look at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(SIZE, SIZE), network(2)
        self.looks = False

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Map (T, B, SIZE) to a loss."""
        if self.looks and x.sum().item() > 1e9:
            return x.sum()
        state = torch.zeros_like(x[0])
        for row in x:
            state = torch.tanh(self.cell(torch.sin(row + state) * torch.sigmoid(row)))
        return self.out(state if scale == 1.0 else state * scale).pow(2).mean()


def _optimized(model: nn.Module, **options: object) -> nn.Module:
    return torchecho.optimize(model, engine="eager", cost="roofline", **options)


def _batch(length: int) -> Tensor:
    return torch.randn(length, 16, SIZE)


def _peak_bytes(model: nn.Module, length: int) -> int:
    """Return the peak of a step, its batch included."""
    with PeakProbe() as probe:
        x = _batch(length)
        loss = model(x)
        loss.backward()
        del loss
        peak = probe.read()
    model.zero_grad(set_to_none=True)
    return peak


@pytest.fixture(scope="module")
def budget_bytes() -> int:
    """Return a budget that the longest batch meets only under a plan."""
    untouched, floor = _plan(max_slowdown=0.0), _plan(max_slowdown=100.0)
    assert floor.floor_bytes < 0.5 * untouched.baseline_peak_bytes
    return (floor.floor_bytes + untouched.baseline_peak_bytes) // 2


def _plan(**options: object) -> torchecho.Plan:
    return torchecho.plan(Recurring(), _batch(LARGEST), engine="eager", cost="roofline", **options)


def test_every_step_from_the_first_is_inside_the_budget(budget_bytes: int) -> None:
    model = _optimized(Recurring(), memory_budget=budget_bytes, strict=True, largest=_batch(LARGEST))
    plan = torchecho.plans()[-1]
    assert plan.predicted_peak_bytes <= budget_bytes < plan.baseline_peak_bytes
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    for length in (20, LARGEST, 40, LARGEST):
        assert _peak_bytes(model, length) + parameter_bytes <= budget_bytes
    assert_clean()


def test_the_longest_step_runs_as_rehearsed(budget_bytes: int) -> None:
    model = _optimized(Recurring(), memory_budget=budget_bytes, strict=True, largest=_batch(LARGEST))
    count = len(torchecho.plans())
    for _ in range(3):
        _peak_bytes(model, LARGEST)
    plan = torchecho.plans()[-1]
    assert len(torchecho.plans()) == count
    assert plan.num_recomputed
    assert plan.measured_peak_bytes == plan.predicted_peak_bytes


def test_steps_give_the_bits_of_plain_pytorch(budget_bytes: int) -> None:
    found = []
    for is_optimized in (False, True):
        torch.manual_seed(0)
        model = Recurring()
        if is_optimized:
            _optimized(model, memory_budget=budget_bytes, strict=True, largest=_batch(LARGEST).zero_())
        torch.manual_seed(1)
        kept: list[Tensor | None] = []
        for length in (20, LARGEST, 40, 60, LARGEST):
            loss = model(_batch(length))
            loss.backward()
            kept += [loss.detach(), *gradients(model)]
        found.append(kept)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert_clean()


def test_a_budget_that_the_largest_batch_misses_is_an_error_at_once() -> None:
    model = Recurring()
    with pytest.raises(torchecho.BudgetError, match="is below the floor"):
        _optimized(model, memory_budget=1000, largest=_batch(LARGEST))
    assert model._compiled_call_impl is None


def test_a_loss_outside_the_model_is_planned_from_the_first_real_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")  # work for later is done at once

    def step() -> None:
        y = model(x)
        for _ in range(30):
            y = torch.sin(y) * y
        y.sum().backward()
        model.zero_grad(set_to_none=True)

    model, x = network(2), torch.randn(256, SIZE)
    budget = 40 * x.nbytes
    _optimized(model, memory_budget=budget, largest=x)
    rehearsed, count = torchecho.plans()[-1], len(torchecho.plans())
    assert rehearsed.num_recomputed == 0
    with pytest.warns(torchecho.EchoWarning, match="rehearsal did less; a real step is planned next"):
        step()
    step()  # recorded
    step()
    assert len(torchecho.plans()) == count + 1
    assert torchecho.plans()[-1].num_recomputed
    assert torchecho.plans()[-1].measured_peak_bytes <= budget


def test_a_forward_that_looks_at_values_falls_back_with_one_warning() -> None:
    model = Recurring()
    model.looks = True
    with pytest.warns(
        torchecho.EchoWarning, match=r"no plan for its largest batch.*let the largest batch come"
    ) as told:
        _optimized(model, max_slowdown=100.0, largest=_batch(8))
    assert len(told) == 1
    count = len(torchecho.plans())
    model(_batch(8)).backward()
    assert len(torchecho.plans()) == count + 1
    assert_clean()
    with pytest.raises(torchecho.EchoError, match="no plan for its largest batch"):
        _optimized(model, strict=True, largest=_batch(8))


def test_a_layer_without_a_fake_form_falls_back() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(SIZE, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0].sum()

    with pytest.warns(torchecho.EchoWarning, match=r"'lstm' runs in oneDNN.*convert"):
        _optimized(Reader(), largest=_batch(8))


def test_arguments_by_name() -> None:
    model = _optimized(Recurring(), max_slowdown=100.0, strict=True, largest={"x": _batch(8), "scale": 0.5})
    count = len(torchecho.plans())
    model(x=_batch(8), scale=0.5).backward()
    assert len(torchecho.plans()) == count
    assert 0 < torchecho.plans()[-1].measured_peak_bytes <= torchecho.plans()[-1].predicted_peak_bytes


def test_the_model_and_the_random_numbers_stay_as_they_were() -> None:
    model = network(2).append(nn.BatchNorm1d(SIZE)).append(nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    _optimized(model, strict=True, largest=torch.empty(16, SIZE))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert_clean()


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (3, "a tensor, a tuple of the model's positional arguments, or a dict.*got an object of type int"),
        ((), "holds no tensor: give what one training step"),
        ((2.0, [1]), "holds no tensor"),
        ((torch.ones(2, 2, SIZE), 1.0, 3), r"does not fit Recurring.forward\(x.*too many positional arguments"),
        ({"y": torch.ones(2)}, r"does not fit Recurring.forward.*missing a required argument: 'x'"),
        ({1: torch.ones(2)}, "of type dict"),
    ],
)
def test_a_bad_example_is_named(largest: object, expected: str) -> None:
    with pytest.raises(torchecho.OptionError, match=expected):
        _optimized(Recurring(), largest=largest)


def test_an_example_whose_sizes_do_not_fit_falls_back_and_says_why() -> None:
    with pytest.warns(torchecho.EchoWarning, match="RuntimeError"):
        _optimized(Recurring(), largest=torch.ones(4, 16, SIZE + 1))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torchecho.optimize(Recurring(), engine="compile", largest=x),
        lambda x: torchecho.budget("1GiB", largest=x),
        lambda x: torchecho.plan(Recurring(), x, largest=x),
    ],
)
def test_other_doors_take_no_example(call: Callable[[Tensor], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torchecho.OptionError, match=r"largest .*leave it out"):
            call(_batch(4))
