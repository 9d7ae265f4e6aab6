"""Decisions become valid schedules, with copies where they are needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.graphs import ALL, base_schedule, chain, changed_in_place, fan_out, random_draw
from tests.strategies import decisions_for, training_graphs
from tests.verify import verify_schedule
from torchecho.errors import ScheduleError
from torchecho.planner.decisions import SINGLE_COPY, Decisions, build_schedule, find_needs, save_all


def _recompute(graph, *names, window=SINGLE_COPY):
    chosen = tuple(op.name in names or op.name in names[0].split() for op in graph.ops)
    schedule = build_schedule(find_needs(graph), Decisions(chosen, (window,) * len(graph.ops)))
    return " ".join(graph.ops[i].name for i in schedule.steps)


@pytest.mark.parametrize("name", ALL)
def test_saving_all_is_the_untouched_step(name):
    graph = ALL[name]().graph
    assert build_schedule(find_needs(graph), save_all(graph)) == base_schedule(graph)


def test_a_recomputed_op_runs_again_right_before_its_reader():
    assert _recompute(chain().graph, "a") == "a b loss gb a ga gx"


def test_what_a_copy_reads_runs_again_too_when_it_is_recomputed():
    assert _recompute(chain().graph, "a b") == "a b loss a b gb ga gx"


def test_a_short_window_makes_one_copy_a_reader():
    assert _recompute(fan_out().graph, "a", window=SINGLE_COPY) == "a loss a g1 g2 g3 gx"
    # the readers of a are neighbours: a window of one op holds one copy for all of them
    assert _recompute(fan_out().graph, "a", window=1) == "a loss a g1 g2 g3 gx"


def test_a_gap_wider_than_the_window_ends_a_copy():
    # a is read before gb for the second copy of b, and by ga right after: two uses, one op apart
    assert _recompute(chain().graph, "a b", window=1) == "a b loss a b gb ga gx"


def test_ops_that_may_not_repeat_are_stashed_whatever_is_decided():
    assert _recompute(random_draw().graph, "mask y") == "mask y loss y gy gx"


def test_what_is_changed_in_place_is_made_again_with_the_change():
    assert _recompute(changed_in_place().graph, "y then y_") == "y z y_ loss gl y then y_ gx"
    assert _recompute(changed_in_place().graph, "y y_") == "y z y_ loss gl gx"


def test_what_the_change_reads_is_made_again_first():
    # z is of after y and before the change: its copy comes before that of both together
    assert _recompute(changed_in_place().graph, "z", "y then y_") == "y z y_ loss gl z y then y_ gx"


def test_too_many_copies_are_refused():
    graph = chain().graph
    everything = Decisions((True,) * len(graph.ops), (SINGLE_COPY,) * len(graph.ops))
    with pytest.raises(ScheduleError, match="more than 1 copies"):
        build_schedule(find_needs(graph), everything, max_copies=1)


@given(st.data())
def test_any_decisions_give_a_valid_schedule(data):
    graph, _ = data.draw(training_graphs(repeats=data.draw(st.booleans())))
    verify_schedule(graph, build_schedule(find_needs(graph), data.draw(decisions_for(graph))))


@given(training_graphs() | training_graphs(repeats=True))
def test_saving_all_runs_every_op_that_anything_needs_once(made):
    graph, _ = made
    base, built = base_schedule(graph), build_schedule(find_needs(graph), save_all(graph))
    assert set(built.steps) <= set(base.steps)
    assert built.backward == base.backward
    left_out = set(base.steps) - set(built.steps)
    read = {s for i in built.steps for s in graph.read_storages[i]}
    assert all(not read & set(graph.allocated_storages[i]) for i in left_out)
