"""Replay counts live bytes as one does by hand, with any number of copies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs import ALL, base_schedule, chain, changed_in_place, fan_out, held_output, lstm, unused_output
from tests.simulate.reference import reference_live_bytes
from tests.strategies import decisions_for, training_graphs
from torchecho.errors import ScheduleError
from torchecho.ir.schedule import Schedule
from torchecho.planner.decisions import build_schedule, find_needs
from torchecho.simulate.replay import live_bytes, peak_bytes, replay, replay_tables, stash_bytes


def _tables(counted):
    return replay_tables(counted.graph, counted.costs.workspace_bytes)


def _schedule(graph, names, num_forward):
    place = {op.name: i for i, op in enumerate(graph.ops)}
    return Schedule(tuple(place[name] for name in names.split()), num_forward)


@pytest.mark.parametrize("name", ALL)
def test_every_step_is_as_counted_by_hand(name):
    counted = ALL[name]()
    schedule = base_schedule(counted.graph)
    assert tuple(live_bytes(_tables(counted), schedule).tolist()) == counted.live_bytes
    assert peak_bytes(_tables(counted), schedule) == max(counted.live_bytes)


@pytest.mark.parametrize("name", ALL)
def test_stash_is_as_counted_by_hand(name):
    counted = ALL[name]()
    assert stash_bytes(_tables(counted), base_schedule(counted.graph)) == counted.stash_bytes


def test_one_copy_recomputed_by_hand():
    counted = chain()
    schedule = _schedule(counted.graph, "a b loss gb a ga gx", 3)
    # a is freed after b and made again after gb: gb reads t1 b16 and makes gb16, beside x2 loss1
    assert live_bytes(_tables(counted), schedule).tolist() == [10, 26, 19, 36, 27, 35, 13]
    assert stash_bytes(_tables(counted), schedule) == 16


def test_three_copies_of_one_op_by_hand():
    counted = fan_out()
    schedule = _schedule(counted.graph, "a loss a g1 a g2 a g3 gx", 2)
    # x4 loss1 throughout the backward; t1 until g1; every copy of a lives from its own step to the read after it
    assert live_bytes(_tables(counted), schedule).tolist() == [104, 105, 106, 111, 110, 116, 111, 118, 16]


def test_a_second_copy_while_the_first_is_alive_counts_twice_only_if_both_are_read():
    counted = fan_out()
    schedule = _schedule(counted.graph, "a loss g1 a g2 g3 gx", 2)
    # the first copy dies with g1, before the second is made
    assert live_bytes(_tables(counted), schedule).tolist() == [104, 105, 111, 110, 116, 118, 16]


def test_copy_of_several_ops_at_once_by_hand():
    counted = changed_in_place()
    graph = counted.graph
    assert live_bytes(_tables(counted), base_schedule(graph)).tolist() == list(counted.live_bytes)
    schedule = Schedule((0, 1, 2, 4, 5, 1, 3, 6), 4)
    # y z y_ loss as ever; x2 loss1 t1 gl20; z4; y10 and 3 of workspace; z has been read: x2 loss1 gl20 y10 gx2
    assert live_bytes(_tables(counted), schedule).tolist() == [13, 16, 19, 13, 24, 27, 40, 35]
    assert stash_bytes(_tables(counted), schedule) == 0


def test_the_first_copy_of_a_held_storage_lives_on():
    counted = held_output()
    schedule = _schedule(counted.graph, "h y h gh gx", 2)
    # the first h is freed after y; x2 stays for the second h; y20 is held: h y t20; then gh40 beside h y t; h y gh gx2
    assert live_bytes(_tables(counted), schedule).tolist() == [42, 62, 82, 120, 102]


def test_an_unused_output_of_a_copy_dies_at_once():
    counted = unused_output()
    schedule = _schedule(counted.graph, "pool loss pool gx", 2)
    # 1000 x2: pool 6+50+9; loss1 beside 6; t1 loss1 pool 6+50+9; t1 loss1 6 gx2
    assert live_bytes(_tables(counted), schedule).tolist() == [1067, 1009, 1069, 1012]


def test_reading_what_is_not_live_names_step_op_and_storage():
    counted = lstm()
    schedule = _schedule(counted.graph, "gates1 hidden1", 2)
    with pytest.raises(ScheduleError, match=r"step 1 \(hidden1, no source line\) reads cell1"):
        live_bytes(_tables(counted), schedule)


@pytest.mark.parametrize("name", ALL)
def test_categories_add_up(name):
    counted = ALL[name]()
    timeline = replay(_tables(counted), base_schedule(counted.graph))
    assert timeline.live_bytes == counted.live_bytes
    assert tuple(map(sum, zip(*timeline.by_category.values(), strict=True))) == counted.live_bytes


@settings(max_examples=200)
@given(st.data())
def test_any_schedule_replays_as_the_reference_says(data):
    graph, costs = data.draw(training_graphs(repeats=data.draw(st.booleans())))
    schedule = build_schedule(find_needs(graph), data.draw(decisions_for(graph)))
    timeline = replay(replay_tables(graph, costs.workspace_bytes), schedule)
    assert list(timeline.live_bytes) == reference_live_bytes(graph, costs.workspace_bytes, schedule)
    assert tuple(map(sum, zip(*timeline.by_category.values(), strict=True))) == timeline.live_bytes
    assert timeline.peak_bytes == max(timeline.live_bytes)
