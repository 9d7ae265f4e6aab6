"""A long search is made beside the training: the first steps follow the plan of a short one."""

import time

import pytest

import torchecho
from tests.engine.eager_steps import at_floor, batch, network
from torchecho.engine import eager, later
from torchecho.engine.eager import SHORT_SEARCH
from torchecho.errors import BudgetError
from torchecho.planner.search import Effort

_LITTLE_EFFORT = Effort(steps=60_000, hull_solves=16, segment_solves=4)


@pytest.fixture
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "short_effort", lambda _: _LITTLE_EFFORT)


def _step(model: object) -> None:
    model(batch()).pow(2).mean().backward()


def _train_until_searched(model: object) -> int:
    """Return how many steps followed the plan of the short search."""
    num_steps = 0
    while SHORT_SEARCH in torchecho.plans()[-1].notes:
        _step(model)
        time.sleep(0.01)
        num_steps += 1
    return num_steps


@pytest.mark.usefixtures("_short_searches")
def test_plan_of_the_whole_search_takes_the_place_of_the_short_one() -> None:
    count = len(torchecho.plans())
    model = at_floor(network())
    _step(model)
    (short,) = torchecho.plans()[count:]
    assert SHORT_SEARCH in short.notes
    with later.held_back():
        _step(model)
    assert torchecho.plans()[count:][0].notes == short.notes
    assert _train_until_searched(model) >= 1
    (whole,) = torchecho.plans()[count:]
    model = at_floor(network())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "short_effort", lambda _: None)
        _step(model)
    at_once = torchecho.plans()[-1]
    assert SHORT_SEARCH not in at_once.notes
    assert whole.predicted_peak_bytes == min(short.predicted_peak_bytes, at_once.predicted_peak_bytes)
    assert len(at_once.frontier) >= len(short.frontier)


@pytest.mark.usefixtures("_short_searches")
def test_budget_that_no_plan_keeps_is_told_at_once() -> None:
    model = torchecho.optimize(network(), engine="eager", memory_budget=1, cost="roofline")
    with pytest.raises(BudgetError, match="below the floor"):
        _step(model)


def test_small_graphs_are_searched_whole() -> None:
    count = len(torchecho.plans())
    _step(at_floor(network()))
    assert SHORT_SEARCH not in torchecho.plans()[count:][0].notes
