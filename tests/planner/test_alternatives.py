"""Choosing among graphs that compute the same with other costs and bytes."""

import dataclasses

import pytest

from bench.graphs import transformer
from tests.planner.plans import make_plan
from torchecho.errors import BudgetError
from torchecho.planner.alternatives import floor_bytes, make_plan_among
from torchecho.planner.planner import make_archive

HALF_MORE = 1.5


@pytest.fixture(scope="module")
def archives():
    """Return the archive of a graph, and of one whose activations are half as large and whose ops are slower."""
    graph, costs = transformer(3)
    halved = [
        dataclasses.replace(s, size_bytes=s.size_bytes // 2) if s.producer is not None else s for s in graph.storages
    ]
    slower = dataclasses.replace(costs, seconds=tuple(HALF_MORE * s for s in costs.seconds))
    return make_archive(graph, costs), make_archive(dataclasses.replace(graph, storages=tuple(halved)), slower)


def test_what_the_untouched_step_fits_stays_untouched(archives):
    place, plan = make_plan_among(archives, archives[0].baseline_peak_bytes, None)
    assert (place, plan.overhead, plan.num_recomputed) == (0, 0.0, 0)


def test_a_smaller_graph_is_chosen_where_only_it_fits(archives):
    budget = archives[0].floor_bytes - 1
    place, plan = make_plan_among(archives, budget, None)
    assert place == 1
    assert plan.predicted_peak_bytes <= budget
    assert plan.overhead >= HALF_MORE - 1 - 1e-9  # against the untouched step of the first
    assert plan.baseline_peak_bytes == archives[0].baseline_peak_bytes
    assert plan.floor_bytes == floor_bytes(archives) == archives[1].floor_bytes
    assert plan.overhead_bound <= plan.overhead


def test_no_plan_of_any_archive_is_faster_inside_the_budget(archives):
    base = archives[0].search.baseline_seconds
    for budget in range(archives[1].floor_bytes, archives[0].baseline_peak_bytes, 10_000_000):
        _, plan = make_plan_among(archives, budget, None)
        totals = [
            a.search.baseline_seconds + c.added_seconds
            for a in archives
            for c in a.candidates
            if c.peak_bytes <= budget
        ]
        assert base * (1 + plan.overhead) == pytest.approx(min(totals))


def test_the_frontier_falls(archives):
    _, plan = make_plan_among(archives, None, 0.0)
    peaks, overheads = zip(*plan.frontier, strict=True)
    assert list(peaks) == sorted(set(peaks), reverse=True)
    assert list(overheads) == sorted(overheads)
    assert peaks[-1] == archives[1].floor_bytes


def test_a_budget_below_every_floor_is_refused(archives):
    with pytest.raises(BudgetError, match="is below the floor"):
        make_plan_among(archives, archives[1].floor_bytes - 1, None)


def test_a_budget_that_costs_more_than_the_slowdown_is_refused(archives):
    with pytest.raises(BudgetError, match=r"more than max_slowdown=0\.1 allows"):
        make_plan_among(archives, archives[1].floor_bytes, 0.1)


def test_where_another_graph_has_a_lower_peak_nothing_is_said_to_be_without_one(archives):
    alone = [dataclasses.replace(archive, candidates=archive.candidates[:1]) for archive in archives]
    assert make_plan(alone[0], None, 0.0).notes
    assert make_plan_among(alone, None, 0.0)[1].notes == ()
