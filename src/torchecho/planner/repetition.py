"""Repetitions of the same structure: ops that do the same thing at every time step or in every layer.

Ops of one class share target, source line, shapes and module path up to its numbers. Decisions made for a class, or
for a share of its members, act alike on all time steps and layers, which keeps the search small on long loops and deep
stacks.
"""

import re
from collections.abc import Mapping, Sequence

from torchecho.ir.graph import TrainingGraph
from torchecho.planner.decisions import Decisions, Needs

_NUMBER = re.compile(r"\d+")

Ranks = Mapping[int, tuple[int, int]]


def find_classes(graph: TrainingGraph, needs: Needs) -> tuple[tuple[int, ...], ...]:
    """Return the classes of repeatable forward ops, members in order."""
    classes: dict[tuple[object, ...], list[int]] = {}
    for index in needs.forward:
        if needs.repeatable[index]:
            op = graph.ops[index]
            key = (op.target, op.source, _NUMBER.sub("#", op.module), op.signature)
            classes.setdefault(key, []).append(index)
    return tuple(tuple(members) for members in classes.values())


def ranks(classes: Sequence[Sequence[int]]) -> Ranks:
    """Return for each op of a class its (occurrence, number of occurrences) there."""
    return {op: (occurrence, len(members)) for members in classes for occurrence, op in enumerate(members)}


def forward_ranks(needs: Needs) -> Ranks:
    """Return the (place, number of places) of each forward op that may be recomputed among these."""
    return ranks([[op for op in needs.forward if needs.repeatable[op]]])


def blend_prefix(a: Decisions, b: Decisions, rank: Ranks, share: float) -> Decisions:
    """Return `b` for the first `share` of every class and `a` for the rest.

    The last members are the first whose backward runs, when the stash is at its largest: kept as in `a`, they need no
    room for recomputed copies at that moment.
    """
    return _mixed(b, a, [op for op, (i, n) in rank.items() if i >= share * n])


def blend_stride(a: Decisions, b: Decisions, rank: Ranks, stride: int) -> Decisions:
    """Return `a` for every `stride`-th member of a class that repeats and `b` for the others."""
    return _mixed(b, a, [op for op, (i, n) in rank.items() if n > 1 and i % stride == 0])


def _mixed(most: Decisions, few: Decisions, ops: Sequence[int]) -> Decisions:
    """Return the decisions of `few` for some ops and of `most` for all others."""
    recompute, window = list(most.recompute), list(most.reuse_window)
    for op in ops:
        recompute[op], window[op] = few.recompute[op], few.reuse_window[op]
    return Decisions(tuple(recompute), tuple(window))


def with_class(decisions: Decisions, members: Sequence[int], *, recompute: bool, window: int) -> Decisions:
    """Return `decisions` with the members of a class decided anew."""
    new_recompute, new_window = list(decisions.recompute), list(decisions.reuse_window)
    for op in members:
        new_recompute[op], new_window[op] = recompute, window
    return Decisions(tuple(new_recompute), tuple(new_window))
