"""Write the code that runs a schedule of taped calls: a forward and a backward, each call as it was on the tape.

A recomputed copy is the very kernel of the forward called again on the same values, so that it gives the same bits. A
buffer is allocated right before the call that fills it and deleted right after the last call that reads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchecho.capture.kernel_tape import Entry, Tape
from torchecho.errors import ApplyError
from torchecho.ir.graph import TrainingGraph
from torchecho.ir.schedule import Schedule

Run = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class TapedStep:
    """A forward and a backward that run a schedule; both empty the list of inputs that they are given."""

    forward: Run
    backward: Run


def apply_to_tape(tape: Tape, graph: TrainingGraph, schedule: Schedule, num_forward_outputs: int) -> TapedStep:
    """Return the functions that run a schedule of a tape.

    The forward returns the user's outputs and as many saved tensors as its tape does; the plan's stash fills them, and
    tensors without bytes the rest.

    Raises:
        ApplyError: the schedule stashes more tensors than there is room for.
    """
    stashed = stashed_storages(tape, graph, schedule)
    room = len(tape.forward_outputs) - num_forward_outputs
    if len(stashed) > room:
        raise ApplyError(f"the plan stashes {len(stashed)} tensors, and the generated code has room for {room}")
    writer = _Writer(tape, graph)
    outputs = [text for text, _ in tape.forward_outputs[:num_forward_outputs]]
    saved = [*(f"s{storage}" for storage in stashed), *["nothing"] * (room - len(stashed))]
    kept = {*stashed, *(s for _, s in tape.forward_outputs[:num_forward_outputs] if s is not None)}
    forward = writer.write(schedule.forward, _names(tape.forward_inputs), [*outputs, *saved], kept, tape.forward_inputs)
    names = [*saved_names(stashed, room), *_names(tape.backward_inputs[room:])]
    gradients = [text for text, _ in tape.backward_outputs]
    kept = {s for _, s in tape.backward_outputs if s is not None}
    given = [*stashed, *tape.backward_inputs[room:]]
    backward = writer.write(schedule.backward, names, gradients, kept, given)
    return TapedStep(_compiled(forward, tape.objects), _compiled(backward, tape.objects))


def stashed_storages(tape: Tape, graph: TrainingGraph, schedule: Schedule) -> tuple[int, ...]:
    """Return the storages that the backward phase of a schedule reads before it has made them, in order."""
    tangents = {s for s in tape.backward_inputs if s is not None} - _known_to_forward(tape)
    constants = {i for i, s in enumerate(tape.storages) if s.is_given} - set(tape.forward_inputs) - tangents
    fresh: set[int] = set()
    crossing: set[int] = set()
    for index in schedule.backward:
        crossing.update(s for s in graph.read_storages[index] if s not in fresh)
        fresh.update(graph.allocated_storages[index])
    crossing.update(s for _, s in tape.backward_outputs if s is not None and s not in fresh)
    return tuple(sorted(crossing - tangents - constants))


def _known_to_forward(tape: Tape) -> set[int]:
    filled = {s for entry in tape.forward for s in (*entry.writes, *(made for made, _ in entry.makes))}
    return {*filled, *(s for s in tape.forward_inputs if s is not None)}


def saved_names(stashed: Sequence[int], room: int) -> list[str]:
    """Return the names under which the backward receives the saved tensors."""
    return [*(f"s{storage}" for storage in stashed), *["_"] * (room - len(stashed))]


def _names(storages: Sequence[int | None]) -> list[str]:
    return ["_" if storage is None else f"s{storage}" for storage in storages]


@dataclass(frozen=True)
class _Writer:
    tape: Tape
    graph: TrainingGraph

    def write(
        self,
        steps: Sequence[int],
        names: Sequence[str],
        results: Sequence[str],
        kept: set[int],
        given: Sequence[int | None],
    ) -> str:
        """Return the text of a function that runs the steps and returns the results."""
        entries = [*self.tape.forward, *self.tape.backward]
        lines = ["def call(arguments):", f"    {''.join(n + ', ' for n in names)}= arguments" if names else ""]
        lines.append("    arguments.clear()")
        lines += [
            f"    s{storage} = {self.tape.storages[storage].code}" for storage in self._unfilled(steps, kept, given)
        ]
        dying = self._dying(steps, kept, {s for s in given if s is not None})
        lines += [f"    del s{storage}" for storage in dying[-1]]
        for position, index in enumerate(steps):
            lines += [f"    {line}" for line in self._call(entries[index], index)]
            lines += [f"    del s{storage}" for storage in dying[position]]
        lines.append(f"    return ({''.join(text + ', ' for text in results)})")
        return "\n".join(lines) + "\n"

    def _unfilled(self, steps: Sequence[int], kept: set[int], given: Sequence[int | None]) -> list[int]:
        """Return the buffers without elements that are wanted: no call fills them, so that none makes them."""
        wanted = {*kept, *(s for index in steps for s in self.graph.read_storages[index])} - set(given)
        made = {s for index in steps for s in self.graph.allocated_storages[index]}
        return [storage for storage in sorted(wanted - made) if self.tape.storages[storage].code]

    def _call(self, entry: Entry, index: int) -> list[str]:
        fresh = [s for s in self.graph.allocated_storages[index] if self.tape.storages[s].code]
        lines = [f"s{storage} = {self.tape.storages[storage].code}" for storage in fresh]
        if not entry.makes:
            return [*lines, entry.code]
        lines.append(f"made = {entry.code}")
        lines += [f"s{storage} = made{pick}" for storage, pick in entry.makes]
        return [*lines, "del made"]

    def _dying(self, steps: Sequence[int], kept: set[int], given: set[int]) -> dict[int, list[int]]:
        """Return the storages to delete after each step; under -1 those that no step reads."""
        dying: dict[int, list[int]] = {position: [] for position in range(-1, len(steps))}
        needed = set(kept)
        for position in reversed(range(len(steps))):
            index = steps[position]
            made, read = self.graph.allocated_storages[index], self.graph.read_storages[index]
            for storage in dict.fromkeys((*read, *made)):
                if storage not in needed and not self._is_constant(storage):
                    dying[position].append(storage)
            needed.difference_update(made)
            needed.update(read)
        dying[-1] = sorted(given - needed)
        return dying

    def _is_constant(self, storage: int) -> bool:
        known = self.tape.storages[storage]
        return known.is_given and storage not in self.tape.forward_inputs and storage not in self.tape.backward_inputs


def _compiled(text: str, objects: dict[str, Any]) -> Run:
    scope: dict[str, Any] = {**objects, "nothing": torch.empty(0)}
    exec(compile(text, "<torchecho plan>", "exec"), scope)  # noqa: S102 - written above, from Inductor's own code
    call: Run = scope["call"]
    return call
