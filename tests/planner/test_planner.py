"""Budgets and slowdowns choose from the archive; what cannot be reached is refused with the facts."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.graphs import StepBuilder, transformer
from tests.graphs import base_schedule, chain
from tests.planner.plans import make_plan
from tests.strategies import training_graphs
from torchecho.errors import BudgetError
from torchecho.ir.graph import Category, Phase
from torchecho.planner.alternatives import choose
from torchecho.planner.planner import make_archive, overhead_bound
from torchecho.units import format_bytes


@pytest.fixture(scope="module")
def archive():
    return make_archive(*transformer(4))


def test_a_budget_of_the_whole_peak_changes_nothing(archive):
    plan = make_plan(archive, 1.0, None)
    assert plan.schedule == base_schedule(archive.search.graph)
    assert (plan.overhead, plan.num_recomputed) == (0.0, 0)
    assert plan.predicted_peak_bytes == plan.baseline_peak_bytes == plan.budget_bytes


def test_a_fraction_is_a_share_of_the_untouched_peak(archive):
    plan = make_plan(archive, 0.75, None)
    assert plan.budget_bytes == int(0.75 * archive.baseline_peak_bytes)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan == make_plan(archive, plan.budget_bytes, None)


def test_the_bound_is_that_of_the_budget_and_not_of_the_peak_below_it(archive):
    pairs = itertools.pairwise(archive.candidates[len(archive.candidates) // 2 :])
    above, below = max(pairs, key=lambda pair: pair[0].peak_bytes - pair[1].peak_bytes)
    between = make_plan(archive, above.peak_bytes - 1, None)
    assert between.predicted_peak_bytes == below.peak_bytes
    assert between.overhead_bound == overhead_bound(archive, above.peak_bytes - 1)
    assert between.overhead_bound < make_plan(archive, below.peak_bytes, None).overhead_bound


@settings(max_examples=60)
@given(training_graphs() | training_graphs(repeats=True))
def test_a_larger_budget_is_never_slower_and_a_smaller_never_higher(made):
    archive = make_archive(*made)
    budgets = range(archive.floor_bytes, archive.baseline_peak_bytes + 1)
    chosen = [choose([archive], budget, None)[1] for budget in budgets]
    for budget, candidate in zip(budgets, chosen, strict=True):
        assert candidate.peak_bytes <= budget
    for smaller, larger in itertools.pairwise(chosen):
        assert smaller.peak_bytes <= larger.peak_bytes
        assert smaller.added_seconds >= larger.added_seconds


@settings(max_examples=60)
@given(training_graphs() | training_graphs(repeats=True), st.floats(0, 2))
def test_a_slowdown_is_kept_and_gives_the_smallest_peak_within_it(made, slowdown):
    archive = make_archive(*made)
    allowed = slowdown * archive.search.baseline_seconds + 1e-12
    _, candidate = choose([archive], None, slowdown)
    assert candidate.added_seconds <= allowed
    assert all(c.added_seconds > allowed for c in archive.candidates if c.peak_bytes < candidate.peak_bytes)


def test_no_slowdown_recomputes_nothing_that_costs_time(archive):
    plan = make_plan(archive, None, 0.0)
    costs = archive.search.costs
    again = [i for i in plan.schedule.backward if archive.search.graph.ops[i].phase == Phase.FORWARD]
    assert sum(costs.seconds[i] for i in again) == 0.0


def test_no_slowdown_still_recomputes_what_is_free():
    step = StepBuilder("free")
    x = step.source("x", 1)
    (a,) = step.op("a", [x], [50], seconds=0.0)
    (b,) = step.op("b", [a], [30])
    step.op("loss", [b], [1], category=Category.OUTPUT, held=True)
    t = step.source("t", 1, Category.TANGENT, held=False)
    (g,) = step.op("g", [t, b], [30], phase=Phase.BACKWARD, category=Category.TEMPORARY)
    step.op("gx", [g, a], [1], phase=Phase.BACKWARD, category=Category.GRADIENT, held=True)
    plan = make_plan(make_archive(*step.build()), None, 0.0)
    # untouched: a50 b30 loss1 t1 g30 x1 = 113; with a made again after b is gone: g30 a50 gx1 loss1 x1 = 83
    assert (plan.baseline_peak_bytes, plan.predicted_peak_bytes, plan.overhead) == (113, 83, 0.0)
    assert plan.num_recomputed == 1


def test_the_untouched_step_wins_a_tie():
    step = StepBuilder("tie")
    x = step.source("x", 1)
    (a,) = step.op("a", [x], [50], seconds=0.0)
    (b,) = step.op("b", [x], [30])
    step.op("loss", [b], [1], category=Category.OUTPUT, held=True)
    t = step.source("t", 1, Category.TANGENT, held=False)
    (g,) = step.op("g", [t, b], [30], phase=Phase.BACKWARD, category=Category.TEMPORARY)
    step.op("gx", [g, a], [1], phase=Phase.BACKWARD, category=Category.GRADIENT, held=True)
    archive = make_archive(*step.build())
    # a is only read by gx: run there instead it lowers the peak from 113 (a50 b30 loss1 t1 g30 x1) to 83, for nothing
    assert (archive.baseline_peak_bytes, archive.floor_bytes) == (113, 83)
    assert make_plan(archive, 113, None).schedule == base_schedule(archive.search.graph)
    assert make_plan(archive, 112, None).predicted_peak_bytes == 83


def test_an_unreachable_budget_names_the_floor_and_its_parts(archive):
    with pytest.raises(BudgetError) as refusal:
        make_plan(archive, archive.floor_bytes - 1, None)
    message = str(refusal.value)
    assert format_bytes(archive.floor_bytes) in message
    assert "parameter" in message
    assert "Raise the budget" in message
    assert make_plan(archive, archive.floor_bytes, None).predicted_peak_bytes == archive.floor_bytes


def test_a_budget_that_needs_more_than_the_slowdown_is_refused(archive):
    tight = archive.floor_bytes
    with pytest.raises(BudgetError, match=r"needs \+.* % step time, more than max_slowdown=0.001"):
        make_plan(archive, tight, 0.001)


def test_a_graph_with_nothing_to_recompute_says_so():
    step = StepBuilder("nothing")
    x = step.source("x", 10)
    (a,) = step.op("a", [x], [5], keep_reason="draws random numbers", source="model.py:3")
    step.op("gx", [a], [10], phase=Phase.BACKWARD, category=Category.GRADIENT, held=True)
    plan = make_plan(make_archive(*step.build()), None, 0.5)
    assert plan.overhead == 0.0
    assert plan.notes[0].startswith("nothing to recompute lowers the peak")
    assert plan.kept_reasons == (("draws random numbers", 1),)


def test_the_numbers_of_a_plan_by_hand():
    counted = chain()
    archive = make_archive(counted.graph, counted.costs)
    plan = make_plan(archive, 36, None, name="chain")
    # a (3 s) runs again after gb: peaks 36 at gb; untouched 44; base time 3 + 5 + loss, gb, ga, gx of 1 s each
    assert (plan.baseline_peak_bytes, plan.predicted_peak_bytes) == (44, 36)
    assert plan.baseline_seconds == 12.0
    assert plan.overhead == pytest.approx(3 / 12)
    assert (plan.stash_bytes, plan.baseline_stash_bytes) == (16, 24)
    assert (plan.num_recomputed, plan.num_stashed, plan.num_ops) == (1, 1, 6)
    assert [(row.target, row.count, row.bytes, row.seconds) for row in plan.recomputed] == [("a", 1, 8, 3.0)]
    assert [(row.target, row.bytes) for row in plan.stashed] == [("b", 16)]
    assert sum(row.bytes for row in plan.at_peak) == 36


def test_plan_of_a_step_that_recomputation_can_hardly_help_says_so() -> None:
    step = StepBuilder("logits")
    x = step.source("x", 4)
    (hidden,) = step.op("hidden", [x], [10], source="model.py:3")
    (logits,) = step.op("logits", [hidden], [200], keep_reason="draws random numbers", source="model.py:4")
    step.op("loss", [logits], [1], category=Category.OUTPUT, held=True)
    (gl,) = step.op("gl", [logits], [200], phase=Phase.BACKWARD, category=Category.TEMPORARY)
    step.op("gx", [gl, hidden], [4], phase=Phase.BACKWARD, category=Category.GRADIENT, held=True)
    archive = make_archive(*step.build())
    plan = make_plan(archive, None, 10.0)
    # x4 and loss1 stay; logits and their gradient are 400 of 415 bytes, and hidden's 10 are all that can go.
    assert (plan.baseline_peak_bytes, plan.floor_bytes) == (415, 405)
    largest = "gl 200 B, logits at model.py:4 200 B, input 4 B"  # alike rows by source line
    assert plan.notes == (f"recomputation lowers the peak to 405 B at most: the peak is at gl (backward): {largest}",)
