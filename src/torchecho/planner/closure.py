"""The price-per-byte closure: the exact best choice of what to stash at a price, by one minimum cut.

With one recomputation of each op, and memory counted where forward ends and backward begins, the cheapest choice at a
price of `price` seconds a byte is a minimum-weight closure: a storage that the backward needs is available (pay for its
bytes) and perhaps recomputed (get the bytes back, pay its op's seconds, and need everything that the op reads).

For any plan with at most X bytes in the stash, `closure(price) - price * X` is less than or equal to its added seconds,
however many copies it makes: the plan must at least once recompute what it does not stash. That is the bound.

Source: minimum-weight closure as minimum cut, J.-C. Picard, Management Science 22(11), 1976.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from torchecho.cost.model import OpCosts
from torchecho.ir.graph import TrainingGraph
from torchecho.planner.decisions import Needs

Floats = npt.NDArray[np.float64]
_CAPACITY_SUM = 2**29


@dataclass(frozen=True, slots=True)
class ClosureProblem:
    """The implications of a graph, made once; only the weights depend on the price.

    Rows 0..num_storages-1 are "available", the next num_storages "recomputed", then one "runs again" per op. An arc
    says that one row implies another.

    Attributes:
        op_of_storage: For each storage the op that allocates it.
        op_of_arc: For each arc the op that it is about.
    """

    ops: tuple[int, ...]
    weight_bytes: Floats
    weight_seconds: Floats
    forced: npt.NDArray[np.int64]
    implies_from: npt.NDArray[np.int64]
    implies_to: npt.NDArray[np.int64]
    op_of_storage: npt.NDArray[np.int64]
    op_of_arc: npt.NDArray[np.int64]

    def within(self, repeatable: Sequence[bool]) -> "ClosureProblem":
        """Return the problem in which only some of the repeatable ops may be recomputed."""
        may = np.array(repeatable, dtype=bool)
        num = len(self.op_of_storage)
        weight_bytes = self.weight_bytes.copy()
        weight_bytes[num : 2 * num] *= may[self.op_of_storage]
        there = may[self.op_of_arc]
        return replace(
            self,
            weight_bytes=weight_bytes,
            implies_from=self.implies_from[there],
            implies_to=self.implies_to[there],
            op_of_arc=self.op_of_arc[there],
        )


@dataclass(frozen=True, slots=True)
class ClosureSolution:
    """The best choice at a price: which ops run again, bytes in the stash, seconds added."""

    recompute: tuple[int, ...]
    stash_bytes: float
    seconds: float


def closure_problem(graph: TrainingGraph, needs: Needs, costs: OpCosts) -> ClosureProblem:
    """Build the implications of a graph."""
    forward = [op for op in needs.forward if graph.allocated_storages[op]]
    storages = [s for op in forward for s in graph.allocated_storages[op]]
    row = {s: i for i, s in enumerate(storages)}
    num = len(storages)
    size = np.array([0 if graph.storages[s].held else graph.storages[s].size_bytes for s in storages], dtype=float)
    forced = sorted({row[s] for op in needs.backward for s in graph.read_storages[op] if s in row})
    arcs: list[tuple[int, int, int]] = []
    for k, op in enumerate(forward):
        if not needs.repeatable[op]:
            continue
        run = 2 * num + k
        for s in graph.allocated_storages[op]:
            arcs += [(num + row[s], row[s], op), (num + row[s], run, op)]
        arcs += [(run, row[s], op) for s in graph.read_storages[op] if s in row]
    implies_from, implies_to, op_of_arc = np.array(arcs, dtype=np.int64).reshape(-1, 3).T
    op_of_storage = np.array([op for op in forward for _ in graph.allocated_storages[op]], dtype=np.int64)
    may = np.array(needs.repeatable, dtype=bool)[op_of_storage]
    return ClosureProblem(
        ops=tuple(forward),
        weight_bytes=np.concatenate([size, -size * may, np.zeros(len(forward))]),
        weight_seconds=np.concatenate([np.zeros(2 * num), [costs.copy_seconds(graph, op) for op in forward]]),
        forced=np.array(forced, dtype=np.int64),
        implies_from=implies_from,
        implies_to=implies_to,
        op_of_storage=op_of_storage,
        op_of_arc=op_of_arc,
    )


def solve_closure(problem: ClosureProblem, price: float) -> ClosureSolution:
    """Return the cheapest choice at `price` seconds a byte."""
    weight = price * problem.weight_bytes + problem.weight_seconds
    num = len(weight)
    source, sink = num, num + 1
    scale = _CAPACITY_SUM / (float(np.abs(weight).sum()) or 1.0)
    capacity = np.rint(np.abs(weight) * scale).astype(np.int64)
    negative, positive = np.flatnonzero(weight < 0), np.flatnonzero(weight > 0)
    tail = np.concatenate(
        [np.full(len(negative), source), positive, np.full(len(problem.forced), source), problem.implies_from]
    )
    head = np.concatenate([negative, np.full(len(positive), sink), problem.forced, problem.implies_to])
    infinite = np.full(len(problem.forced) + len(problem.implies_from), 2 * _CAPACITY_SUM)
    flow_capacity = np.concatenate([capacity[negative], capacity[positive], infinite]).astype(np.int32)
    network = csr_matrix((flow_capacity, (tail, head)), shape=(num + 2, num + 2))
    residual = network - maximum_flow(network, source, sink).flow
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    chosen = np.zeros(num + 2, dtype=bool)
    chosen[breadth_first_order(residual, source, return_predecessors=False)] = True
    chosen = chosen[:num]
    first_run = num - len(problem.ops)
    runs = tuple(op for k, op in enumerate(problem.ops) if chosen[first_run + k])
    return ClosureSolution(runs, float(problem.weight_bytes[chosen].sum()), float(problem.weight_seconds[chosen].sum()))


def closure_value(solution: ClosureSolution, price: float) -> float:
    """Return the weighted sum that the closure minimises."""
    return price * solution.stash_bytes + solution.seconds


def closure_hull(problem: ClosureProblem, max_solves: int) -> tuple[list[ClosureSolution], list[float]]:
    """Return the vertices of the lower hull of (stash bytes, added seconds), and the prices that were solved.

    Between two known vertices the price at which they cost the same either yields a better vertex or proves that there
    is none; the pair with the largest area between them is split first, until `max_solves` problems have been solved.
    """
    total_seconds = max(float(problem.weight_seconds.sum()), 1e-12)
    largest = total_seconds / 64  # the whole step for 64 bytes: nothing that recomputation can avoid is stashed
    cheapest, tightest = solve_closure(problem, 0.0), solve_closure(problem, largest)
    vertices, prices = [cheapest, tightest], [largest]
    open_pairs = [(cheapest, tightest)]
    while open_pairs and len(prices) < max_solves:
        pair = max(open_pairs, key=_area)
        open_pairs.remove(pair)
        left, right = pair
        if left.stash_bytes - right.stash_bytes < 1 or right.seconds <= left.seconds:
            continue
        price = (right.seconds - left.seconds) / (left.stash_bytes - right.stash_bytes)
        middle = solve_closure(problem, price)
        prices.append(price)
        if closure_value(middle, price) < closure_value(left, price) * (1 - 1e-6):
            vertices.append(middle)
            open_pairs += [(left, middle), (middle, right)]
    return sorted(vertices, key=lambda v: -v.stash_bytes), prices


def _area(pair: tuple[ClosureSolution, ClosureSolution]) -> float:
    left, right = pair
    return (left.stash_bytes - right.stash_bytes) * (right.seconds - left.seconds)
