"""The exact optimum of tiny graphs: a shortest path over (position, live storages), any number of copies included.

Only for graphs of about a dozen ops: there are as many states as subsets of forward storages, at every position.
"""

import heapq
from collections.abc import Iterator

from torchecho.cost.model import OpCosts
from torchecho.ir.graph import Category, Phase, TrainingGraph


class ExactSearch:
    """The state space of one graph: `position` counts the forward ops decided, then the backward ops run."""

    def __init__(self, graph: TrainingGraph, costs: OpCosts) -> None:
        self.graph, self.costs = graph, costs
        self.forward = [i for i in graph.kernels if graph.ops[i].phase == Phase.FORWARD]
        self.backward = [i for i in graph.kernels if graph.ops[i].phase == Phase.BACKWARD]
        fixed = {i for i, s in enumerate(graph.storages) if self._is_fixed(i) or self._is_backward(i)}
        self.free = [i for i in range(len(graph.storages)) if i not in fixed]
        self.bit = {storage: 1 << k for k, storage in enumerate(self.free)}
        self.size = {1 << k: graph.storages[storage].size_bytes for k, storage in enumerate(self.free)}
        self.reads = {i: self._mask(graph.read_storages[i]) for i in graph.kernels}
        self.makes = {i: self._mask(graph.allocated_storages[i]) for i in self.forward}
        self.held = self._mask([s for s in self.free if graph.storages[s].held])
        self.sources = self._mask([s for s in self.free if self._is_source(s)])
        self.tangents = self._mask([s for s in self.free if graph.storages[s].category == Category.TANGENT])
        self.gradients_before, self.gradients_at = self._gradients()

    def _is_fixed(self, index: int) -> bool:
        storage = self.graph.storages[index]
        return storage.producer is None and storage.held and storage.category != Category.TANGENT

    def _is_source(self, index: int) -> bool:
        storage = self.graph.storages[index]
        return storage.producer is None and storage.category != Category.TANGENT

    def _is_backward(self, index: int) -> bool:
        producer = self.graph.storages[index].producer
        return producer is not None and self.graph.ops[producer].phase == Phase.BACKWARD

    def _mask(self, storages: list[int] | tuple[int, ...]) -> int:
        return sum(self.bit[s] for s in storages if s in self.bit)

    def _gradients(self) -> tuple[list[int], list[int]]:
        """Return the bytes that the backward itself keeps alive before and at each of its ops."""
        before, at = [0] * len(self.backward), [0] * len(self.backward)
        for index, storage in enumerate(self.graph.storages):
            if not self._is_backward(index):
                continue
            born = self.backward.index(storage.producer)
            reads = [k for k, op in enumerate(self.backward) if index in self.graph.read_storages[op]]
            last = len(self.backward) - 1 if storage.held else max([born, *reads])
            for k in range(born, last + 1):
                at[k] += storage.size_bytes
                before[k] += storage.size_bytes if k > born else 0
        return before, at

    def live_bytes(self, mask: int) -> int:
        """Return the bytes of a set of storages."""
        return sum(size for bit, size in self.size.items() if mask & bit)

    def moves(self, position: int, mask: int, budget: int) -> Iterator[tuple[float, int, int]]:
        """Yield (seconds, position, mask) after each thing that may happen next inside the budget."""
        kept = self.held | (0 if position >= len(self.forward) else self.tangents)
        for bit in self.size:
            if mask & bit and not kept & bit:
                yield 0.0, position, mask & ~bit
        if position < len(self.forward):
            yield from self._forward_moves(position, mask, budget)
        elif position - len(self.forward) < len(self.backward):
            yield from self._backward_moves(position, mask, budget)

    def _forward_moves(self, position: int, mask: int, budget: int) -> Iterator[tuple[float, int, int]]:
        op = self.forward[position]
        tangents = self.tangents if position + 1 == len(self.forward) else 0
        if not self.graph.ops[op].keep_reason and not self.makes[op] & self.held:
            yield 0.0, position + 1, mask | tangents
        after = self._run(op, mask, 0, budget)
        if after is not None:
            yield self.costs.seconds[op], position + 1, after | tangents

    def _backward_moves(self, position: int, mask: int, budget: int) -> Iterator[tuple[float, int, int]]:
        place = position - len(self.forward)
        for op in self.forward:
            if not self.graph.ops[op].keep_reason and self.makes[op] & ~mask and not self.makes[op] & self.held:
                after = self._run(op, mask, self.gradients_before[place], budget)
                if after is not None:
                    yield self.costs.seconds[op], position, after
        after = self._run(self.backward[place], mask, self.gradients_at[place], budget)
        if after is not None:
            yield self.costs.seconds[self.backward[place]], position + 1, after

    def _run(self, op: int, mask: int, others: int, budget: int) -> int | None:
        if self.reads[op] & ~mask:
            return None
        after = mask | self.makes.get(op, 0)
        total = self.graph.fixed_bytes + self.live_bytes(after) + others + self.costs.workspace_bytes[op]
        return after if total <= budget else None

    def best_seconds(self, budget: int) -> float | None:
        """Return the seconds of the fastest step whose peak is at most `budget`; None when there is none."""
        start = (0, self.sources | (0 if self.forward else self.tangents))
        done: set[tuple[int, int]] = set()
        best = {start: 0.0}
        heap = [(0.0, start)]
        while heap:
            seconds, state = heapq.heappop(heap)
            if state in done:
                continue
            done.add(state)
            if state[0] == len(self.forward) + len(self.backward):
                return seconds
            for added, position, mask in self.moves(*state, budget):
                after = (position, mask)
                if seconds + added < best.get(after, float("inf")):
                    best[after] = seconds + added
                    heapq.heappush(heap, (seconds + added, after))
        return None
