"""Repetitions of the same structure: ops that do the same thing at every time step or in every layer.

Ops of one class share target, source line, shapes and module path up to its numbers. Decisions made for a class, or
for a share of its members, act alike on all time steps and layers, which keeps the search small on long loops and deep
stacks.
"""

import re
from collections.abc import Sequence

from torchecho.ir.graph import TrainingGraph
from torchecho.planner.decisions import Decisions, Needs

_NUMBER = re.compile(r"\d+")

Ranks = tuple[tuple[int, int], ...]


def find_classes(graph: TrainingGraph, needs: Needs) -> tuple[tuple[int, ...], ...]:
    """Return the classes of repeatable forward ops, members in order."""
    classes: dict[tuple[object, ...], list[int]] = {}
    for index in needs.forward:
        if needs.repeatable[index]:
            op = graph.ops[index]
            key = (op.target, op.source, _NUMBER.sub("#", op.module), op.signature)
            classes.setdefault(key, []).append(index)
    return tuple(tuple(members) for members in classes.values())


def ranks(classes: Sequence[Sequence[int]], num_ops: int) -> Ranks:
    """Return for each op its (occurrence, number of occurrences) in its class; (0, 1) for an op without one."""
    rank = [(0, 1)] * num_ops
    for members in classes:
        for occurrence, op in enumerate(members):
            rank[op] = (occurrence, len(members))
    return tuple(rank)


def forward_ranks(needs: Needs, num_ops: int) -> Ranks:
    """Return for each op its (place, number of places) among the forward ops that may be recomputed."""
    ops = [op for op in needs.forward if needs.repeatable[op]]
    return ranks([ops], num_ops)


def blend_prefix(a: Decisions, b: Decisions, rank: Ranks, share: float) -> Decisions:
    """Return `b` for the first `share` of every class and `a` for the rest.

    The last members are the first whose backward runs, when the stash is at its largest: kept as in `a`, they need no
    room for recomputed copies at that moment.
    """
    takes_b = [i < share * n for i, n in rank]
    return _choose(takes_b, a, b)


def blend_stride(a: Decisions, b: Decisions, rank: Ranks, stride: int) -> Decisions:
    """Return `a` for every `stride`-th member of a class that repeats and `b` for the others."""
    takes_b = [n < 2 or i % stride != 0 for i, n in rank]
    return _choose(takes_b, a, b)


def _choose(takes_b: Sequence[bool], a: Decisions, b: Decisions) -> Decisions:
    # lists, because a generator takes twice as long, and thousands of ops are blended hundreds of times
    recompute = [y if t else x for t, x, y in zip(takes_b, a.recompute, b.recompute, strict=True)]
    window = [y if t else x for t, x, y in zip(takes_b, a.reuse_window, b.reuse_window, strict=True)]
    return Decisions(tuple(recompute), tuple(window))


def with_class(decisions: Decisions, members: Sequence[int], *, recompute: bool, window: int) -> Decisions:
    """Return `decisions` with the members of a class decided anew."""
    new_recompute, new_window = list(decisions.recompute), list(decisions.reuse_window)
    for op in members:
        new_recompute[op], new_window[op] = recompute, window
    return Decisions(tuple(new_recompute), tuple(new_window))
