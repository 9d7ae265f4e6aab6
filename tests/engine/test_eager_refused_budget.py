"""A budget that no plan meets is refused at every step of its size, also where the program catches the first error."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchecho
from tests.engine.eager_steps import SIZE, assert_clean, network

OPTIONS = {"cost": "roofline"}


def _optimized(**options: object) -> nn.Module:
    return torchecho.optimize(network(), **OPTIONS, **options)


def _step(model: nn.Module, rows: int = 64) -> None:
    model(torch.randn(rows, SIZE)).pow(2).mean().backward()
    model.zero_grad()


def _message(step: Callable[[], None]) -> str:
    with pytest.raises(torchecho.BudgetError, match="below the floor") as caught:
        step()
    assert_clean()
    return str(caught.value)


def test_later_steps_raise_the_same_before_they_run() -> None:
    model = _optimized(memory_budget="1KiB")
    first = _message(lambda: _step(model))
    model.zero_grad()
    runs: list[object] = []
    model.register_forward_pre_hook(lambda *seen: runs.append(seen))
    assert [_message(lambda: _step(model)) for _ in range(2)] == [first] * 2
    assert runs == []


def test_steps_that_are_larger_or_add_to_gradients_raise_it_too() -> None:
    model = _optimized(memory_budget="1KiB")
    first = _message(lambda: _step(model))
    assert _message(lambda: _step(model)) == first
    assert _message(lambda: _step(model, rows=65)) == first


def _floor_bytes(rows: int) -> int:
    _step(_optimized(max_slowdown=100.0), rows)
    return torchecho.plans()[-1].floor_bytes


# The first step that fits runs before there is a plan for it.
@pytest.mark.filterwarnings("ignore:.*the first step, which ran before:torchecho.errors.EchoWarning")
def test_smaller_steps_are_planned_for_themselves_at_once() -> None:
    budget_bytes = _floor_bytes(32) + 1024
    model = _optimized(memory_budget=budget_bytes)
    _message(lambda: _step(model, rows=64))
    model.zero_grad()
    _message(lambda: _step(model, rows=48))
    model.zero_grad()
    before = len(torchecho.plans())
    for _ in range(2):
        _step(model, rows=32)
    [plan] = torchecho.plans()[before:]
    assert plan.measured_peak_bytes <= budget_bytes


def test_blocks_raise_it_as_they_begin() -> None:
    model, entered = network(), []

    def step() -> None:
        with torchecho.budget("1KiB", **OPTIONS):
            entered.append(True)
            model(torch.randn(64, SIZE)).pow(2).mean().backward()

    assert len({_message(step) for _ in range(3)}) == 1
    assert entered == [True]


def test_strict_raises_again_what_kept_a_step_from_being_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no costs")

    monkeypatch.setattr("torchecho.engine.draft.price", fails)
    model = _optimized(max_slowdown=0.5, strict=True)
    for _ in range(2):
        with pytest.raises(torchecho.EchoError, match="failed: no costs"):
            _step(model)
