"""Check the invariants of graphs and schedules, one message each."""

from collections import Counter

from torchecho.errors import GraphError, ScheduleError
from torchecho.ir.graph import Phase, TrainingGraph
from torchecho.ir.schedule import Schedule


def verify_graph(graph: TrainingGraph) -> None:
    """Check that a graph is well formed.

    Raises:
        GraphError: an index is out of range, an op reads what no earlier op makes, a view allocates, a forward op reads
            what the backward phase makes, an op repeats a later one or one of the backward, or a storage disagrees with
            its producer.
    """
    first_write: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for value in op.writes:
            first_write.setdefault(value, index)
    for index, op in enumerate(graph.ops):
        for value in op.reads:
            _check_read(graph, index, value, first_write)
        _check_repeats(graph, index)
    for index, storage in enumerate(graph.storages):
        if storage.size_bytes < 0:
            raise GraphError(f"storage {storage.name} has {storage.size_bytes} bytes")
        if storage.producer is not None and graph.ops[storage.producer].is_view:
            raise GraphError(f"storage {storage.name} is allocated by {graph.ops[storage.producer].name}, a view")
        if storage.producer is not None and not _writes_storage(graph, storage.producer, index):
            raise GraphError(f"storage {storage.name} is not written by its producer")


def _check_read(graph: TrainingGraph, index: int, value: int, first_write: dict[int, int]) -> None:
    op = graph.ops[index]
    if not 0 <= value < len(graph.values):
        raise GraphError(f"op {op.name} reads value {value}; there are {len(graph.values)}")
    producer = graph.storages[graph.values[value].storage].producer
    if (producer is not None and producer >= index) or first_write.get(value, -1) > index:
        raise GraphError(f"op {op.name} reads {graph.values[value].name} before it is made")
    if producer is not None and op.phase == Phase.FORWARD and graph.ops[producer].phase == Phase.BACKWARD:
        raise GraphError(f"forward op {op.name} reads {graph.values[value].name}, made in the backward phase")


def _check_repeats(graph: TrainingGraph, index: int) -> None:
    for repeated in graph.ops[index].repeats:
        earlier = graph.ops[repeated] if 0 <= repeated < index else None
        if earlier is None or earlier.phase == Phase.BACKWARD or earlier.repeats:
            raise GraphError(f"op {graph.ops[index].name} repeats op {repeated}: that is no earlier op of the forward")
        if not graph.forward_is_fixed:
            raise GraphError(f"op {graph.ops[index].name} repeats others in a forward that is not fixed")


def _writes_storage(graph: TrainingGraph, op: int, storage: int) -> bool:
    return any(graph.values[value].storage == storage for value in graph.ops[op].writes)


def verify_schedule(graph: TrainingGraph, schedule: Schedule) -> None:
    """Check that a schedule runs the step and repeats only what may be repeated.

    Raises:
        ScheduleError: an op that must run is missing, a view is scheduled, an op that may not be repeated has copies,
            the backward phase is reordered, or a step reads what is not live.
    """
    counts = Counter(schedule.steps)
    for index, op in enumerate(graph.ops):
        if op.repeats and index in schedule.forward:
            raise ScheduleError(f"{op.name} repeats other ops, and stands in the forward phase")
        if op.is_view and counts[index]:
            raise ScheduleError(f"{op.name} is a view: views follow their storage and are never scheduled")
        if counts[index] > 1 and (op.keep_reason or op.phase == Phase.BACKWARD):
            raise ScheduleError(f"{op.name} runs {counts[index]} times: {op.keep_reason or 'backward ops run once'}")
        if op.phase == Phase.BACKWARD and not op.is_view and counts[index] != 1:
            raise ScheduleError(f"backward op {op.name} runs {counts[index]} times, not once")
        if not op.is_view and op.keep_reason and counts[index] != 1:
            raise ScheduleError(f"{op.name} runs {counts[index]} times, not once: {op.keep_reason}")
    _check_order(graph, schedule)
    _check_live(graph, schedule)


def _check_order(graph: TrainingGraph, schedule: Schedule) -> None:
    if any(graph.ops[i].phase == Phase.BACKWARD for i in schedule.forward):
        raise ScheduleError("a backward op stands in the forward phase")
    if any(a >= b for a, b in zip(schedule.forward, schedule.forward[1:], strict=False)):
        raise ScheduleError("the forward phase is not in graph order")
    backward = [i for i in schedule.backward if graph.ops[i].phase == Phase.BACKWARD]
    if backward != sorted(backward):
        raise ScheduleError("the backward ops are not in graph order")
    for storage in graph.storages:
        if storage.held and storage.producer is not None and storage.producer not in schedule.steps:
            raise ScheduleError(f"{storage.name} is handed out but nothing makes it")


def _check_live(graph: TrainingGraph, schedule: Schedule) -> None:
    made: set[int] = set()
    for step, index in enumerate(schedule.steps):
        for storage in graph.read_storages[index]:
            if graph.storages[storage].producer is not None and storage not in made:
                raise ScheduleError(
                    f"step {step} ({graph.ops[index].name}) reads {graph.storages[storage].name}, which is not live"
                )
        made.update(graph.allocated_storages[index])
