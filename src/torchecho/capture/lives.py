"""Find out from when to when each storage of a recorded step is there in the steps that nobody records.

Those differ from the recorded one: sums of gradients lie on their first summands, and the program holds what the model
has returned in the step before. Of what no call has made, other calls say when it was there.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from torchecho.capture.recording import Recording, StorageRecord
from torchecho.capture.sums import find_sums_in_place

LEFT_OVER = "left over"  # the storage for what the program may hold of the step before
_MOST_BYTES_OF_A_NUMBER = 8


@dataclass(frozen=True)
class Lives:
    """The lives of the storages of a step.

    Attributes:
        records: What became of each storage, by its number; the last is for what is left over of the step before.
        lies_on: For each storage of a sum of gradients that takes no memory of its own the one on which it lies.
        beside: What is allocated in the backward outside of all calls, by the position of the call beside which it is.
    """

    records: list[StorageRecord]
    lies_on: Mapping[int, int]
    beside: Mapping[int, list[int]]

    def place_of(self, number: int) -> int:
        """Return the storage on which a storage lies: itself, as a rule."""
        return self.lies_on.get(number, number)


def find_lives(recording: Recording, backward_starts: int) -> Lives:
    """Return the lives of the storages of a recorded step."""
    lies_on = find_sums_in_place(recording.log, backward_starts)
    records = [_without_recipes(record) if recording.has_recipes else record for record in recording.storages]
    for made, first in lies_on.items():  # in order: the last of several sums says when all are freed
        records[first] = replace(records[first], freed=records[made].freed)
        records[made] = replace(records[made], size_bytes=0, producer=None, freed=0)
    beside: dict[int, list[int]] = defaultdict(list)
    for number, position in recording.log.apart.items():
        records[number] = _apart(recording, records[number], position, backward_starts)
        producer = records[number].producer
        if producer is not None:
            beside[producer].append(number)
    records.append(_left_over(recording, backward_starts))
    return Lives(records, lies_on, beside)


def _without_recipes(record: StorageRecord) -> StorageRecord:
    """Let what the step was given die when the program and autograd have let go of it, and only recipes hold it."""
    if not record.is_given or record.freed is None or not record.let_go:
        return record
    return replace(record, freed=min(record.freed, max([*record.let_go, *record.unsaved])))


def _apart(recording: Recording, record: StorageRecord, position: int, backward_starts: int) -> StorageRecord:
    """Let the life of what no call has made begin with the step or, in the backward, with the call that follows."""
    calls = recording.calls
    freed = len(calls) if record.freed is None else record.freed
    if position < backward_starts:
        return replace(record, is_given=True, freed=freed)
    beside = next((p for p in range(position, freed) if calls[p].runs), None)
    if beside is None:
        return replace(record, size_bytes=0, freed=0)
    return replace(record, producer=beside, freed=freed)


def _left_over(recording: Recording, backward_starts: int) -> StorageRecord:
    """Return what the program will hold of this step in the next until the model returns anew, as far as it seems.

    That is what the model has returned and is there at the end, numbers left out: the names mostly stay theirs.
    """
    returned = {n: position for n, position in recording.log.returned.items() if position <= backward_starts}
    records = [recording.storages[number] for number in returned]
    held = [r for r in records if r.producer is not None and r.freed is None and r.size_bytes > _MOST_BYTES_OF_A_NUMBER]
    return StorageRecord(
        sum(record.size_bytes for record in held),
        None,
        is_parameter=False,
        is_opaque=False,
        device=held[0].device if held else torch.device("cpu"),
        is_given=True,
        freed=max(returned.values(), default=0),
    )
