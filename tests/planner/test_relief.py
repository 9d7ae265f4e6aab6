"""What a measured step may keep, against counts by hand."""

from torchecho.planner.relief import RecomputedCall, relieve

# Segments: the forward, then two of the backward. Live bytes at most 80, 90, 40 of a budget of 100.
PEAKS = [80, 90, 40]


def saved(call: int | None, size_bytes: int, last: int, *reads: tuple[int, int]) -> RecomputedCall:
    """Return a call with one result that autograd asks for in a segment last."""
    return RecomputedCall(call, {0: size_bytes}, {0: last}, set(reads))


def test_nothing_is_kept_without_room() -> None:
    assert relieve([80, 100, 40], [saved(0, 1, 1)], [1.0], 100) == frozenset()


def test_what_is_worth_most_is_kept_first() -> None:
    calls = [saved(0, 10, 1), saved(1, 10, 1)]
    assert relieve(PEAKS, calls, [1.0, 2.0], 100) == {1}
    assert relieve(PEAKS, calls, [2.0, 1.0], 100) == {0}


def test_earlier_calls_are_kept_first_where_all_are_worth_the_same() -> None:
    assert relieve(PEAKS, [saved(5, 10, 1), saved(6, 10, 1)], [1.0] * 7, 100) == {5}


def test_what_is_used_before_the_peak_costs_nothing_there() -> None:
    """Of 20 bytes that segment 0 has room for, one that segment 1 needs takes all of the 10 left there."""
    assert relieve(PEAKS, [saved(0, 20, 0)], [1.0], 100) == {0}
    assert relieve(PEAKS, [saved(0, 20, 1)], [1.0], 100) == frozenset()
    assert relieve(PEAKS, [saved(0, 10, 0), saved(1, 10, 1)], [1.0, 1.0], 100) == {0, 1}


def test_what_another_call_reads_is_kept_until_that_is_used_last() -> None:
    """Nobody saves result 1 of the first call, but the second reads it, whose own result is used in segment 1."""
    maker = RecomputedCall(0, {0: 1000, 1: 12})
    reader = RecomputedCall(None, {0: 5}, {0: 1}, {(0, 1)})
    assert relieve(PEAKS, [maker, reader], [1.0], 100) == frozenset()
    assert relieve([80, 88, 40], [maker, reader], [1.0], 100) == {0}


def test_results_that_nobody_needs_do_not_count() -> None:
    assert relieve(PEAKS, [RecomputedCall(0, {0: 1})], [1.0], 100) == frozenset()


def test_rounds_beyond_the_planned_ones_cannot_be_kept() -> None:
    assert relieve(PEAKS, [saved(None, 1, 1)], [], 100) == frozenset()
