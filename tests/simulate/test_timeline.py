import pytest

from torchecho.errors import MeasureError
from torchecho.simulate.timeline import Timeline

TIMELINE = Timeline(
    live_bytes=(12, 30, 30, 8),
    base_bytes=8,
    labels=("a", "b", "c", "d"),
    by_category={"activation": (4, 22, 22, 0), "parameter": (8, 8, 8, 8)},
)


def test_peak_is_the_first_of_the_highest_steps():
    assert (TIMELINE.peak_bytes, TIMELINE.peak_step) == (30, 1)


def test_peak_is_the_base_when_the_step_only_frees():
    assert Timeline(live_bytes=(5, 3), base_bytes=9).peak_bytes == 9


def test_timeline_without_steps():
    empty = Timeline(live_bytes=(), base_bytes=7)
    assert (empty.peak_bytes, empty.peak_step) == (7, 0)


@pytest.mark.parametrize("timeline", [TIMELINE, Timeline((1, 2), 0)])
def test_json_both_ways(timeline):
    assert Timeline.from_json(timeline.to_json()) == timeline


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"live_bytes": 3, "base_bytes": 1, "labels": [], "by_category": null}']
)
def test_text_that_is_no_timeline_is_refused(text):
    with pytest.raises(MeasureError, match="cannot read a timeline"):
        Timeline.from_json(text)


def test_series_of_another_length_is_refused():
    with pytest.raises(MeasureError, match="2 steps has 1 entries of 'labels'"):
        Timeline((1, 2), 0, labels=("a",))
    with pytest.raises(MeasureError, match="1 steps has 2 entries of 'input'"):
        Timeline((1,), 0, by_category={"input": (1, 2)})
