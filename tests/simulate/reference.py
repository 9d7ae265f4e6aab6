"""A slow, plain simulator: copies in a dict, one counter of reads to come for each. The law for `replay`."""

from collections import Counter

from torchecho.ir.graph import Category, TrainingGraph
from torchecho.ir.schedule import Schedule

Copy = tuple[int, int]  # storage, step that made it; -1 for what no op makes


def reference_live_bytes(graph: TrainingGraph, workspace_bytes: tuple[int, ...], schedule: Schedule) -> list[int]:
    """Return the live bytes at each step."""
    reads = _reads(graph, schedule)
    to_come = Counter(copy for step in reads for copy in step)
    live: dict[Copy, int] = {}
    made: set[int] = set()
    for index, storage in enumerate(graph.storages):
        if storage.producer is None and storage.category != Category.TANGENT:
            live[index, -1] = storage.size_bytes
    result = []
    for step, op in enumerate(schedule.steps):
        if step == schedule.num_forward:
            for index, storage in enumerate(graph.storages):
                if storage.category == Category.TANGENT:
                    live[index, -1] = storage.size_bytes
        kept = {copy for copy in live if to_come[copy]}
        for index in graph.allocated_storages[op]:
            live[index, step] = graph.storages[index].size_bytes
            if graph.storages[index].held and index not in made:
                to_come[index, step] += 10**9
            made.add(index)
        result.append(graph.base_bytes + sum(live.values()) + workspace_bytes[op])
        to_come.subtract(reads[step])
        live = {copy: size for copy, size in live.items() if to_come[copy] > 0 or _is_outside(graph, copy)}
        assert kept <= set(live) | set(reads[step]), "only what has just been read may die"
    return result


def _reads(graph: TrainingGraph, schedule: Schedule) -> list[list[Copy]]:
    """Return for each step the copies that it reads: always the newest."""
    newest = {i: (i, -1) for i, storage in enumerate(graph.storages) if storage.producer is None}
    reads = []
    for step, op in enumerate(schedule.steps):
        reads.append([newest[index] for index in graph.read_storages[op]])
        newest.update({index: (index, step) for index in graph.allocated_storages[op]})
    return reads


def _is_outside(graph: TrainingGraph, copy: Copy) -> bool:
    """Whether someone outside the step holds a storage that was there before it."""
    return graph.storages[copy[0]].producer is None and graph.storages[copy[0]].held
