"""The closure is the exact optimum of its problem, and its bound holds for every schedule."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs import chain
from tests.planner.optimum import ExactSearch
from tests.strategies import training_graphs
from torchecho.planner.closure import closure_hull, closure_problem, closure_value, solve_closure
from torchecho.planner.decisions import find_needs
from torchecho.planner.planner import make_archive, overhead_bound

PRICES = st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5, 8.0])


def brute_force(graph, costs, price):
    """Return the least of price * stash bytes + seconds over every set of storages that are rebuilt, one run an op."""
    needs = find_needs(graph)
    rebuildable = [s for op in needs.forward if needs.repeatable[op] for s in graph.allocated_storages[op]]
    made = {s for op in needs.forward for s in graph.allocated_storages[op]}
    best = float("inf")
    for size in range(len(rebuildable) + 1):
        for rebuilt in itertools.combinations(rebuildable, size):
            runs = {graph.makers[graph.storages[s].producer] for s in rebuilt}
            needed = {s for op in needs.backward for s in graph.read_storages[op]} & made
            needed |= {s for op in runs for s in graph.read_storages[op]} & made
            stash = (s for s in needed - set(rebuilt) if not graph.storages[s].held)
            value = price * sum(graph.storages[s].size_bytes for s in stash) + sum(costs.seconds[op] for op in runs)
            best = min(best, value)
    return best


@settings(max_examples=150)
@given(training_graphs() | training_graphs(repeats=True), PRICES)
def test_closure_is_the_optimum_of_all_subsets(made, price):
    graph, costs = made
    solution = solve_closure(closure_problem(graph, find_needs(graph), costs), price)
    expected = brute_force(graph, costs, price)
    assert abs(closure_value(solution, price) - expected) <= 1e-5 * max(expected, 1.0)


@given(training_graphs() | training_graphs(repeats=True))
def test_hull_falls_in_bytes_and_rises_in_seconds(made):
    graph, costs = made
    vertices, prices = closure_hull(closure_problem(graph, find_needs(graph), costs), max_solves=8)
    assert all(a.stash_bytes >= b.stash_bytes for a, b in itertools.pairwise(vertices))
    assert all(a.seconds <= b.seconds + 1e-9 for a, b in itertools.pairwise(vertices))
    assert len(prices) <= 8


@settings(max_examples=100)
@given(training_graphs() | training_graphs(repeats=True))
def test_no_candidate_is_below_its_bound(made):
    archive = make_archive(*made)
    baseline = max(archive.search.baseline_seconds, 1e-12)
    for candidate in archive.candidates:
        bound = overhead_bound(archive, candidate.peak_bytes)
        assert bound <= candidate.added_seconds / baseline * (1 + 1e-5) + 1e-6


@settings(max_examples=60)
@given(training_graphs(max_forward=5, max_backward=4), st.floats(0.5, 1.0))
def test_no_schedule_at_all_is_below_the_bound(made, share):
    graph, costs = made
    archive = make_archive(graph, costs)
    budget = int(archive.baseline_peak_bytes * share)
    best = ExactSearch(graph, costs).best_seconds(budget)
    if best is not None:
        overhead = best / archive.search.baseline_seconds - 1
        assert overhead_bound(archive, budget) <= overhead + 1e-5


def test_at_a_high_price_the_chain_is_recomputed_whole():
    counted = chain()
    problem = closure_problem(counted.graph, find_needs(counted.graph), counted.costs)
    solution = solve_closure(problem, 100.0)
    assert [counted.graph.ops[i].name for i in solution.recompute] == ["a", "b"]
    assert (solution.stash_bytes, solution.seconds) == (0.0, 8.0)


def test_at_price_zero_nothing_is_recomputed():
    counted = chain()
    problem = closure_problem(counted.graph, find_needs(counted.graph), counted.costs)
    solution = solve_closure(problem, 0.0)
    assert (solution.recompute, solution.stash_bytes, solution.seconds) == ((), 24.0, 0.0)
