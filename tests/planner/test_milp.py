"""Two oracles, an integer program and a shortest path, agree on the optimum; no candidate of the planner beats it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from bench.graphs import MIB, chain, unet
from tests.graphs import ALL
from tests.planner.milp import IntegerProgram
from tests.planner.optimum import ExactSearch
from tests.strategies import training_graphs
from torchecho.ir.graph import TrainingGraph
from torchecho.planner.planner import make_archive

TINY = {"chain 6": lambda: chain(6), "unet": lambda: unet(1, 2)}


def agree(a: float | None, b: float | None) -> bool:
    """Return whether two optima are the same, or neither exists."""
    return a is b is None or (a is not None and b is not None and a == pytest.approx(b, abs=1e-6))


def in_mebibytes(graph: TrainingGraph) -> TrainingGraph:
    """Return a graph whose sizes are rounded up to whole MiB, which the solver can tell apart."""
    storages = (replace(s, size_bytes=-(-s.size_bytes // MIB) * MIB) for s in graph.storages)
    return replace(graph, storages=tuple(storages))


def budgets_of(archive):
    """Return every peak of an archive, and one byte less than each."""
    peaks = [c.peak_bytes for c in archive.candidates]
    return [*peaks, *(peak - 1 for peak in peaks)]


@pytest.mark.parametrize("name", ALL)
def test_both_oracles_agree_on_hand_counted_graphs(name):
    counted = ALL[name]()
    exact, program = ExactSearch(counted.graph, counted.costs), IntegerProgram(counted.graph, counted.costs)
    for budget in budgets_of(make_archive(counted.graph, counted.costs)):
        assert agree(program.best_seconds(budget), exact.best_seconds(budget))


@pytest.mark.parametrize("name", TINY)
def test_both_oracles_agree_on_tiny_models(name):
    graph, costs = TINY[name]()
    graph = in_mebibytes(graph)
    archive, exact, program = make_archive(graph, costs), ExactSearch(graph, costs), IntegerProgram(graph, costs)
    for candidate in archive.candidates:
        best = program.best_seconds(candidate.peak_bytes)
        assert agree(best, exact.best_seconds(candidate.peak_bytes))
        assert best <= archive.search.baseline_seconds + candidate.added_seconds + 1e-9


def test_recomputing_in_a_chain_by_hand():
    counted = ALL["chain"]()
    program = IntegerProgram(counted.graph, counted.costs)
    # everything once: 3 + 5 + four ops of a second each; gb needs x2 t1 loss1 b16 gb16 = 36 at least, and then a may
    # not lie beside it: a again costs 3; b cannot be had without a: its 5 seconds are never spent twice
    assert program.best_seconds(44) == pytest.approx(12)
    assert program.best_seconds(43) == pytest.approx(15)
    assert program.best_seconds(36) == pytest.approx(15)
    assert program.best_seconds(35) is None


@settings(max_examples=60)
@given(training_graphs(max_forward=5, max_backward=5))
def test_no_candidate_beats_the_program_and_both_oracles_agree(made):
    archive, exact, program = make_archive(*made), ExactSearch(*made), IntegerProgram(*made)
    for candidate in archive.candidates:
        best = program.best_seconds(candidate.peak_bytes)
        assert best is not None
        assert archive.search.baseline_seconds + candidate.added_seconds >= best - 1e-6
        assert agree(best, exact.best_seconds(candidate.peak_bytes))


@settings(max_examples=40)
@given(training_graphs(max_forward=4, max_backward=4))
def test_both_oracles_agree_below_the_floor_of_the_planner(made):
    exact, program = ExactSearch(*made), IntegerProgram(*made)
    floor = make_archive(*made).floor_bytes
    for budget in (floor - 1, floor - 3):
        assert agree(program.best_seconds(budget), exact.best_seconds(budget))
