"""Decisions about feature maps, and the schedule that carries them out.

A forward op is either saved (what the backward reads of it is stashed) or recomputed. A recomputed op runs again just
before the first backward op that needs it, directly or through other recomputed ops. Its copy lives until its last use;
an op with a reuse window is run once more when its next use is further away than the window, so that nothing stays
alive across a long gap: one op may have many copies.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchecho.errors import ScheduleError
from torchecho.ir.graph import Phase, TrainingGraph
from torchecho.ir.schedule import Schedule, schedule_of

SINGLE_COPY = 0
_NEVER = sys.maxsize


@dataclass(frozen=True, slots=True)
class Decisions:
    """One decision per op.

    Attributes:
        recompute: Recompute the op (only ops that may be repeated).
        reuse_window: How long a recomputed copy may wait for its next use, in ticks of the graph's clock (backward ops
            by default); `SINGLE_COPY` for no limit.
    """

    recompute: tuple[bool, ...]
    reuse_window: tuple[int, ...]


@dataclass(frozen=True)
class Needs:
    """Who needs what, op by op: made once for a graph.

    Attributes:
        forward: Forward ops that make things again, in order: kernels, and the ops that repeat some of them in their
            stead.
        first_runs: Forward kernels, in order.
        backward: Backward kernels, in order.
        makers: For each op the forward ops that make again what it reads.
        backward_uses: For each forward op the positions, rising, among `backward` of ops that read what it allocates.
        forward_readers: For each forward op the forward ops that read what it allocates.
        repeatable: Which ops may be recomputed.
        must_run: Which forward ops run in the forward phase whatever is decided.
        clock: When each op of `backward` stands, in the unit of reuse windows.
    """

    forward: tuple[int, ...]
    first_runs: tuple[int, ...]
    backward: tuple[int, ...]
    makers: tuple[tuple[int, ...], ...]
    backward_uses: tuple[tuple[int, ...], ...]
    forward_readers: tuple[tuple[int, ...], ...]
    repeatable: tuple[bool, ...]
    must_run: tuple[bool, ...]
    clock: tuple[int, ...]

    @functools.cached_property
    def backward_array(self) -> npt.NDArray[np.int64]:
        """`backward` as an array: copies are put in between for every candidate."""
        return np.array(self.backward, dtype=np.int64)

    @functools.cached_property
    def first_runs_array(self) -> npt.NDArray[np.int64]:
        """`first_runs` as an array."""
        return np.array(self.first_runs, dtype=np.int64)

    @functools.cached_property
    def last_first(self) -> tuple[int, ...]:
        """The forward ops that may be recomputed, the last one first."""
        return tuple(op for op in reversed(self.forward) if self.repeatable[op])

    @functools.cached_property
    def first_use(self) -> tuple[int, ...]:
        """For each forward op the first of its `backward_uses`; a position beyond all where there is none."""
        return tuple(uses[0] if uses else _NEVER for uses in self.backward_uses)

    @functools.cached_property
    def everything_runs(self) -> bool:
        """Whether all forward ops run in the forward phase whatever is decided."""
        return all(self.must_run[op] for op in self.first_runs)


def find_needs(graph: TrainingGraph) -> Needs:
    """Return who needs what in a graph."""
    ops = graph.ops
    is_forward = [op.phase == Phase.FORWARD for op in ops]
    first_runs = tuple(i for i in graph.kernels if is_forward[i])
    forward = tuple(sorted({graph.makers[i] for i in first_runs}))
    backward = tuple(i for i in graph.kernels if not is_forward[i])
    maker_of = {
        index: graph.makers[storage.producer]
        for index, storage in enumerate(graph.storages)
        if storage.producer is not None and is_forward[storage.producer]
    }
    makers = tuple(tuple(dict.fromkeys([maker_of[s] for s in read if s in maker_of])) for read in graph.read_storages)
    uses: list[list[int]] = [[] for _ in ops]
    readers: list[list[int]] = [[] for _ in ops]
    for position, index in enumerate(backward):
        for maker in makers[index]:
            uses[maker].append(position)
    for index in forward:
        for maker in makers[index]:
            readers[maker].append(index)
    repeatable = [False] * len(ops)
    must_run = [False] * len(ops)
    for index in forward:
        repeatable[index] = not ops[index].keep_reason and bool(graph.allocated_storages[index])
    for index in first_runs:
        handed_out = any(graph.storages[s].held for s in graph.allocated_storages[index])
        must_run[index] = graph.forward_is_fixed or bool(ops[index].keep_reason) or handed_out
    return Needs(
        forward,
        first_runs,
        backward,
        makers,
        tuple(map(tuple, uses)),
        tuple(map(tuple, readers)),
        tuple(repeatable),
        tuple(must_run),
        tuple(graph.clock[i] for i in backward) if graph.clock else tuple(range(len(backward))),
    )


def save_all(graph: TrainingGraph) -> Decisions:
    """Return the decisions of the untouched step: stash whatever the backward reads."""
    return Decisions((False,) * len(graph.ops), (SINGLE_COPY,) * len(graph.ops))


def build_schedule(needs: Needs, decisions: Decisions, max_copies: int | None = None) -> Schedule:
    """Return the schedule that carries out decisions.

    Forward ops that nothing needs any more are left out; every recomputed copy stands right before the backward op
    that needs it first.

    Raises:
        ScheduleError: there would be more than `max_copies` recomputed copies.
    """
    copies, first_use = _place_copies(needs, decisions, max_copies)
    forward = _forward_steps(needs, decisions, first_use)
    place, op = np.divmod(np.sort(np.array(copies, dtype=np.int64)), len(needs.makers))
    return schedule_of(np.concatenate([forward, np.insert(needs.backward_array, place, op)]), len(forward))


def _place_copies(needs: Needs, decisions: Decisions, max_copies: int | None) -> tuple[list[int], list[int]]:
    """Return every copy as position * number of ops + op, and for each op the position of its first use.

    Numbers sort faster than pairs, and only ops with a window have all their uses listed: thousands of ops, hundreds of
    times.
    """
    recompute, window, makers = decisions.recompute, decisions.reuse_window, needs.makers
    num_ops = len(makers)
    first_use = list(needs.first_use)
    added_uses: dict[int, list[int]] = {}
    copies: list[int] = []
    for op in needs.last_first:
        first = first_use[op]
        if first == _NEVER or not recompute[op]:
            continue
        places: Sequence[int] = (first,)
        if window[op] == SINGLE_COPY:
            copies.append(first * num_ops + op)
        else:
            uses = {*needs.backward_uses[op], *added_uses.get(op, ())}
            places = _clusters(sorted(uses), window[op], needs.clock)
            copies += [place * num_ops + op for place in places]
        if max_copies is not None and len(copies) > max_copies:
            raise ScheduleError(f"the decisions make more than {max_copies} copies: recompute less or wait longer")
        for maker in makers[op]:
            if first < first_use[maker]:  # noqa: PLR1730 - a call of min takes three times as long
                first_use[maker] = first
            if window[maker] != SINGLE_COPY and recompute[maker]:
                added_uses.setdefault(maker, []).extend(places)
    return copies, first_use


def _clusters(uses: Sequence[int], window: int, clock: Sequence[int]) -> list[int]:
    """Return the first use of every run of uses that are no further apart than the window."""
    return [use for i, use in enumerate(uses) if i == 0 or clock[use] - clock[uses[i - 1]] > window]


def _forward_steps(needs: Needs, decisions: Decisions, first_use: Sequence[int]) -> npt.NDArray[np.int64]:
    if needs.everything_runs:
        return needs.first_runs_array
    runs = list(needs.must_run)
    for op in reversed(needs.forward):
        is_made_again = decisions.recompute[op] and needs.repeatable[op]
        if not is_made_again and first_use[op] != _NEVER:
            runs[op] = True
        if runs[op]:
            for maker in needs.makers[op]:
                runs[maker] = True
    return np.array([op for op in needs.first_runs if runs[op]], dtype=np.int64)
