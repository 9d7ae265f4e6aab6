"""What the search finds: never better than the exact optimum, as good where it can be, and always the same."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.graphs import chain, transformer, unet
from tests.graphs import ALL
from tests.planner.optimum import ExactSearch
from tests.strategies import training_graphs
from tests.verify import verify_schedule
from torchecho.ir.graph import Phase
from torchecho.planner.planner import make_archive
from torchecho.planner.search import corners
from torchecho.simulate.replay import peak_bytes

TINY = {
    "chain 6": lambda: chain(6),
    "chain 7": lambda: chain(7, seed=3),
    "unet": lambda: unet(1, 2),
    "unet of two levels": lambda: unet(2, 1),
}


def _seconds(archive, candidate):
    return archive.search.baseline_seconds + candidate.added_seconds


@settings(max_examples=80)
@given(training_graphs(max_forward=5, max_backward=5))
def test_nothing_beats_the_exact_optimum(made):
    archive, exact = make_archive(*made), ExactSearch(*made)
    for candidate in archive.candidates:
        best = exact.best_seconds(candidate.peak_bytes)
        assert best is not None
        assert _seconds(archive, candidate) >= best - 1e-9


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("share", [0.9, 0.8])
def test_the_exact_optimum_is_found_on_tiny_models(name, share):
    graph, costs = TINY[name]()
    archive = make_archive(graph, costs)
    budget = int(share * archive.baseline_peak_bytes)
    best = ExactSearch(graph, costs).best_seconds(budget)
    found = min((_seconds(archive, c) for c in archive.candidates if c.peak_bytes <= budget), default=None)
    assert found == (best if best is None else pytest.approx(best))


@pytest.mark.parametrize("name", ALL)
def test_every_peak_of_a_hand_counted_graph_is_optimal(name):
    counted = ALL[name]()
    archive, exact = make_archive(counted.graph, counted.costs), ExactSearch(counted.graph, counted.costs)
    assert archive.baseline_peak_bytes == max(counted.live_bytes)
    for candidate in archive.candidates:
        assert _seconds(archive, candidate) == pytest.approx(exact.best_seconds(candidate.peak_bytes))


@settings(max_examples=60)
@given(training_graphs() | training_graphs(repeats=True))
def test_the_frontier_falls_in_bytes_and_rises_in_seconds(made):
    graph, costs = made
    archive = make_archive(graph, costs)
    assert archive.candidates[0].added_seconds <= 1e-9
    for a, b in itertools.pairwise(archive.candidates):
        assert a.peak_bytes > b.peak_bytes
        assert a.added_seconds <= b.added_seconds


@settings(max_examples=60)
@given(training_graphs() | training_graphs(repeats=True))
def test_every_candidate_is_a_valid_schedule_at_its_simulated_peak(made):
    graph, costs = made
    search = make_archive(graph, costs).search
    for candidate in list(search.seen.values())[:20]:
        schedule = search.schedule(candidate.decisions)
        verify_schedule(graph, schedule)
        assert peak_bytes(search.tables, schedule) == candidate.peak_bytes
        seconds = sum(costs.seconds[i] for i in schedule.steps)
        assert candidate.added_seconds == pytest.approx(seconds - search.baseline_seconds)


@settings(max_examples=60)
@given(training_graphs(), st.floats(0, 10))
def test_every_copy_costs_its_recipe(made, recipe_seconds):
    graph, costs = made
    graph = dataclasses.replace(graph, forward_is_fixed=True)
    search = make_archive(graph, dataclasses.replace(costs, recipe_seconds=recipe_seconds)).search
    for candidate in list(search.seen.values())[:20]:
        again = [op for op in search.schedule(candidate.decisions).backward if graph.ops[op].phase == Phase.FORWARD]
        seconds = sum(costs.seconds[op] + recipe_seconds for op in again)
        assert candidate.added_seconds == pytest.approx(seconds)


def test_the_same_graph_gives_the_same_frontier():
    first, second = (make_archive(*transformer(3)) for _ in range(2))
    assert first.candidates == second.candidates


def test_effort_is_bounded_by_simulated_steps():
    search = make_archive(*transformer(8)).search
    one_evaluation = 9 * len(search.graph.kernels) + 4_000
    assert search.spent <= search.effort.steps + one_evaluation


def test_layers_alike_are_recomputed_in_part():
    archive = make_archive(*transformer(12, weight_share=0))
    peak, baseline = archive.baseline_peak_bytes, archive.search.baseline_seconds
    # between the corners of the closure's hull only shares of the layers lead on: there must be plans all the way down
    shares = [c.peak_bytes / peak for c in archive.candidates]
    assert max(a - b for a, b in itertools.pairwise(shares) if b > 0.3) < 0.02
    best = min(c.added_seconds for c in archive.candidates if c.peak_bytes <= 0.6 * peak)
    # scores and softmax of 12 layers free 8 units each for 3 ms; the rest needs a wide product of some layers
    assert best / baseline < 0.13


def test_corners_are_the_lower_hull():
    archive = make_archive(*chain(7))
    front = list(archive.candidates)
    hull = corners(front)
    assert hull[0] == front[0]
    assert hull[-1] == front[-1]
    slopes = [(b.added_seconds - a.added_seconds) / (a.peak_bytes - b.peak_bytes) for a, b in itertools.pairwise(hull)]
    assert slopes == sorted(slopes)
