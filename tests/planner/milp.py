"""The exact optimum of tiny graphs as an integer program: whether each slot of the step runs its op.

The formulation of Checkmate (P. Jain et al., MLSys 2020, section 4), with our rules: forward ops run in their order,
the backward ops each once in theirs, and before each of them every forward op may run again, in `rounds` rounds of the
forward order. Checkmate decides what is kept after each stage; here that follows, slot by slot, from what later slots
read: presence is a real number that whole decisions drive to 0 or 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from torchecho.cost.model import OpCosts
from torchecho.ir.graph import Category, Phase, TrainingGraph

_INFEASIBLE = 2


@dataclass(frozen=True)
class Slot:
    """A place of the step where one op may run: must it, and does it lie in the backward phase?"""

    op: int
    must_run: bool
    in_backward: bool


@dataclass
class _Rows:
    """Constraints `low <= sum(coefficient * variable) <= high`, one row at a time."""

    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], *, low: float = -np.inf, high: float = np.inf) -> None:
        self.entries += [(len(self.low), variable, coefficient) for variable, coefficient in terms]
        self.low.append(low)
        self.high.append(high)

    def constraint(self, num_variables: int) -> LinearConstraint:
        rows, columns, coefficients = zip(*self.entries, strict=True)
        matrix = csr_matrix((coefficients, (rows, columns)), shape=(len(self.low), num_variables))
        return LinearConstraint(matrix, self.low, self.high)


class IntegerProgram:
    """The program of one graph; variables are one run a slot, then one presence a slot and storage."""

    def __init__(self, graph: TrainingGraph, costs: OpCosts, rounds: int = 2) -> None:
        self.graph, self.costs = graph, costs
        self.slots = self._slots(rounds)
        self.storages = [i for i in range(len(graph.storages)) if not self._is_fixed(i)]
        self.first_backward = next((k for k, slot in enumerate(self.slots) if slot.in_backward), len(self.slots))
        self.num_variables = len(self.slots) * (1 + len(self.storages))

    def _slots(self, rounds: int) -> list[Slot]:
        ops, graph = self.graph.ops, self.graph
        forward = [i for i in graph.kernels if ops[i].phase == Phase.FORWARD]
        again = [i for i in forward if not self._runs_once(i)]
        slots = [Slot(i, self._runs_once(i), in_backward=False) for i in forward]
        for index in graph.kernels:
            if ops[index].phase == Phase.BACKWARD:
                slots += [Slot(i, must_run=False, in_backward=True) for i in again] * rounds
                slots.append(Slot(index, must_run=True, in_backward=True))
        return slots

    def _runs_once(self, op: int) -> bool:
        handed_out = any(self.graph.storages[s].held for s in self.graph.allocated_storages[op])
        return bool(self.graph.ops[op].keep_reason) or handed_out

    def _is_fixed(self, storage: int) -> bool:
        made = self.graph.storages[storage]
        return made.producer is None and made.held and made.category != Category.TANGENT

    def present(self, slot: int, place: int) -> int:
        """Return the variable that says that a storage (by its place) is there while a slot runs."""
        return len(self.slots) * (1 + place) + slot

    def best_seconds(self, budget_bytes: int) -> float | None:
        """Return the seconds of the fastest step whose peak is at most the budget; None when there is none."""
        num_slots = len(self.slots)
        seconds = np.zeros(self.num_variables)
        seconds[:num_slots] = [self.costs.seconds[slot.op] for slot in self.slots]
        whole = np.zeros(self.num_variables)
        whole[:num_slots] = 1
        low, high = np.zeros(self.num_variables), np.ones(self.num_variables)
        low[:num_slots] = [slot.must_run for slot in self.slots]
        self._bound_tangents(low, high)
        result = milp(
            seconds,
            integrality=whole,
            bounds=Bounds(low, high),
            constraints=self._constraints(budget_bytes).constraint(self.num_variables),
        )
        assert result.status in (0, _INFEASIBLE), result.message
        return None if result.status == _INFEASIBLE else float(result.fun)

    def _bound_tangents(self, low: np.ndarray, high: np.ndarray) -> None:
        for place, storage in enumerate(self.storages):
            made = self.graph.storages[storage]
            if made.category == Category.TANGENT:
                high[self.present(0, place) : self.present(0, place) + self.first_backward] = 0
                if made.held:
                    low[self.present(self.first_backward, place) : self.present(0, place) + len(self.slots)] = 1

    def _constraints(self, budget_bytes: int) -> _Rows:
        rows = _Rows()
        unit = self._unit_bytes()
        sizes = [self.graph.storages[s].size_bytes // unit for s in self.storages]
        workspaces = [size // unit for size in self.costs.workspace_bytes]
        everything = sum(sizes) + max(workspaces)
        assert everything < 10**5, "the solver's tolerances need sizes of few units: round them first"
        room = (budget_bytes - self.graph.fixed_bytes) // unit
        for k, slot in enumerate(self.slots):
            reads = self.graph.read_storages[slot.op]
            makes = self.graph.allocated_storages[slot.op]
            for place, storage in enumerate(self.storages):
                now, before = self.present(k, place), self.present(k - 1, place)
                if storage in reads or storage in makes:
                    rows.add([(now, 1), (k, -1)], low=0)
                if not self._may_appear(k, storage):
                    made = [(k, -1.0)] if storage in makes else []
                    rows.add([(now, 1), *made, *([(before, -1.0)] if k else [])], high=0)
                if self._is_kept(storage) and k:
                    rows.add([(now, 1), (before, -1)], low=0)
            taken = [(self.present(k, place), float(size)) for place, size in enumerate(sizes)]
            # a slot that does not run may hold anything: the next one that runs is counted
            held_up = everything + max(-room, 0)
            taken.append((k, float(workspaces[slot.op] + held_up)))
            rows.add(taken, high=room + held_up)
        return rows

    def _unit_bytes(self) -> int:
        """Return the largest unit that measures every size: small coefficients keep the solver exact."""
        sizes = (self.graph.storages[s].size_bytes for s in self.storages)
        return math.gcd(*sizes, *self.costs.workspace_bytes) or 1

    def _may_appear(self, slot: int, storage: int) -> bool:
        """Return whether a storage that no op makes comes to be at a slot."""
        made = self.graph.storages[storage]
        if made.category == Category.TANGENT:
            return slot == self.first_backward
        return made.producer is None and slot == 0

    def _is_kept(self, storage: int) -> bool:
        made = self.graph.storages[storage]
        return made.held and made.producer is not None
