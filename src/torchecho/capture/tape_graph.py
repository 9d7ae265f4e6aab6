"""Turn a recorded step into a `TrainingGraph`.

Views are left out: whoever rebuilds a storage rebuilds its views with it. Two kinds of ops run nothing and only mark a
moment: a release (the program lets go of what it still held after the last use) and an unpacking (autograd hands a
saved tensor to the backward, which holds it until the backward's node has ended).
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from torchecho.capture.describe import Look, flops_of_call, has_flops, looks, signature_of_call
from torchecho.capture.follow_ups import CHANGED_ITSELF, CHANGED_LATER, find_repetitions, last_writes
from torchecho.capture.lives import LEFT_OVER, Lives, find_lives
from torchecho.capture.place import Place, source_of
from torchecho.capture.recording import NO_STORAGE, Call, Recording, StorageRecord, Unpacking
from torchecho.capture.rules import keep_reason_of_call
from torchecho.devices import device_among
from torchecho.errors import CaptureError
from torchecho.ir.graph import RELEASE, UNPACK, Category, Op, Phase, Storage, TrainingGraph, Value
from torchecho.rnn import workspace

_NUMBER_BYTES = 8
_OPAQUE = "works on tensors without a storage of their own"
_SAVED_AGAIN = "a gradient that is differentiated saves what it makes"
_CHANGED_UNSEEN = "the program changes it after it is saved, where autograd does not see it"
_READ_EARLY = "a backward inside the forward reads what it makes"


@dataclass(frozen=True)
class TapeCapture:
    """A training graph and the way back to the calls of the recording.

    Attributes:
        calls_of_op: Indices of the calls behind each op: none for marks, several for one that repeats others.
    """

    graph: TrainingGraph
    recording: Recording
    calls_of_op: tuple[tuple[int, ...], ...]

    @property
    def start_bytes(self) -> int:
        """Bytes alive when the step begins: all that stay, and gradients or inputs that are freed meanwhile."""
        freed = (s.size_bytes for s in self.recording.storages if s.is_given and s.freed is not None)
        return self.graph.fixed_bytes + sum(freed)

    def call(self, index: int) -> tuple[Any, Any, Any]:
        """Return the function and the arguments of an op, with a fake tensor for each tensor."""
        (position,) = self.calls_of_op[index]
        call = self.recording.calls[position]
        with FakeTensorMode():
            args, kwargs = tree_map_only(Look, _fake, (call.args, dict(call.kwargs)), is_leaf=_is_look)
        return call.func, args, kwargs


def _is_look(value: Any) -> bool:
    return type(value) is Look


def _fake(look: Look) -> torch.Tensor:
    made = torch.empty_strided(look.shape, look.strides, dtype=look.dtype, device=look.device)
    made = made.conj() if look.is_conj else made
    return torch._neg_view(made) if look.is_neg else made  # private: no public way to make such a view


def build_graph(
    recording: Recording, *, base_bytes: int = 0, model_bytes: int = 0, state_bytes: int = 0
) -> TapeCapture:
    """Return the training graph of a recorded step.

    Args:
        recording: A whole step: forward, loss and backward.
        base_bytes: Bytes alive throughout the step that the recording does not know.
        model_bytes: Bytes of all parameters and buffers; those that the step did not touch are added to the base.
        state_bytes: Bytes of the optimizer's state at the end of the recorded step.

    Raises:
        CaptureError: no backward was recorded.
    """
    if recording.is_cut:
        raise CaptureError(f"the step makes more than {len(recording.calls)} calls: too many to plan")
    if recording.backward_starts is None:
        raise CaptureError("the recorded step has no backward: call backward() on the loss inside it")
    builder = _Builder(recording, recording.backward_starts)
    builder.walk()
    buffers = recording.log.buffers
    known = (s for n, s in enumerate(recording.storages) if n in buffers or (s.producer is None and s.is_parameter))
    untouched_bytes = max(model_bytes - sum(s.size_bytes for s in known), 0)
    elsewhere_bytes = _elsewhere_bytes(recording, untouched_bytes + state_bytes)
    storages = [builder.storage(number) for number in range(len(builder.records))]
    storages[-1] = replace(storages[-1], name=LEFT_OVER)
    unseen_bytes = max(_wrapped_bytes(recording), recording.unseen_bytes)
    storages.append(Storage("unseen", unseen_bytes, Category.INPUT, None, held=False))
    graph = TrainingGraph(
        ops=tuple(builder.ops),
        values=tuple(Value(s.name, index, (s.size_bytes,), "uint8") for index, s in enumerate(storages)),
        storages=tuple(storages),
        base_bytes=base_bytes + untouched_bytes + elsewhere_bytes,
        forward_is_fixed=True,
        clock=tuple(builder.clock),
    )
    return TapeCapture(graph, recording, tuple(builder.calls))


def step_device(recording: Recording) -> torch.device:
    """Return the device of a step: the first accelerator that it used, else the CPU."""
    return device_among(recording.devices)


def _elsewhere_bytes(recording: Recording, known_bytes: int) -> int:
    """Return what is live on the device beside the step: of libraries (cuBLAS keeps a workspace), of other programs."""
    if recording.live_bytes is None:
        return 0
    kind = step_device(recording).type
    own = (record for record in recording.storages if record.freed is None and record.device.type == kind)
    return max(0, recording.live_bytes - known_bytes - sum(record.size_bytes for record in own))


def _wrapped_bytes(recording: Recording) -> int:
    """Return the bytes of the numbers that calls of the forward got for tensors: autograd may save each as a tensor.

    Such tensors are on the CPU, wherever the step runs.
    """
    if step_device(recording).type != "cpu":
        return 0
    calls = recording.calls[: recording.backward_starts]
    times = Counter(call.kind for call in calls)
    return _NUMBER_BYTES * sum(
        times[kind] * (isinstance(given, (int, float)) and isinstance(argument.type, torch.TensorType))
        for kind, call in {call.kind: call for call in calls}.items()
        for argument, given in zip(call.func._schema.arguments, call.given, strict=False)
    )


@dataclass
class _Builder:
    """The ops of a recording, in order; `reads` of an op grow while what it holds becomes known.

    Attributes:
        records: What became of each storage, by the `lives`.
        held: For calls of the backward the storages that are held until they have run.
    """

    recording: Recording
    backward_starts: int
    ops: list[Op] = field(default_factory=list)
    calls: list[tuple[int, ...]] = field(default_factory=list)
    clock: list[int] = field(default_factory=list)
    op_of_call: dict[int, int] = field(default_factory=dict)
    facts_of_kind: dict[int, dict[str, Any]] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)
    device_type: str = field(init=False)
    lives: Lives = field(init=False)
    records: list[StorageRecord] = field(init=False)
    held: dict[int, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.device_type = step_device(self.recording).type
        self.lives = find_lives(self.recording, self.backward_starts)
        self.records = self.lives.records
        self.held = self._held_in_backward()

    @property
    def last_node(self) -> int:
        """Highest number of an autograd node that the backward ran."""
        return max((unpacking.node for unpacking in self.recording.unpackings), default=0)

    def walk(self) -> None:
        """Make the ops: calls that do something, and the marks between them."""
        reasons = keep_reasons(self.recording, self.backward_starts)
        ends = {unit[-1]: unit for unit in find_repetitions(self.recording, self.backward_starts, reasons)}
        releases = self._releases()
        unpackings = self._unpackings()
        for position, call in enumerate(self.recording.calls):
            if releases[position]:
                self._add(_mark(RELEASE, len(self.ops), Phase.FORWARD, tuple(releases[position])))
            for unpacking in unpackings.get(position, ()):
                place = self.lives.place_of(unpacking.storage)
                if position < self.backward_starts:  # a backward inside the forward, such as a gradient penalty
                    self._add(_mark(RELEASE, len(self.ops), Phase.FORWARD, (unpacking.storage,)))
                elif not self._is_held(self.records[place]):
                    op = _mark(UNPACK, len(self.ops), Phase.BACKWARD, (place,))
                    self._add(op, node=unpacking.node)
            if call.runs:
                self.op_of_call[position] = len(self.ops)
                self._add(self._op(call, position, reasons.get(position, "")), calls=(position,))
            if position in ends:
                self._repeat(ends[position])

    def storage(self, number: int) -> Storage:
        """Return the storage of a number as the graph knows it."""
        record = self.records[number]
        producer = None if record.producer is None else self.op_of_call[record.producer]
        size_bytes = record.size_bytes if record.device.type == self.device_type else 0  # another memory
        return Storage(f"s{number}", size_bytes, self._category(record), producer, self._is_held(record))

    def _op(self, call: Call, position: int, keep_reason: str) -> Op:
        facts = self.facts_of_kind.get(call.kind)
        if facts is None:  # a loop over time makes the same call again and again
            facts = self.facts_of_kind[call.kind] = _facts(call)
        reads = call.reads
        writes = (*(n for n in call.allocates if n not in self.lives.lies_on), *self.lives.beside.get(position, ()))
        if call.in_backward:
            held = (number for number in self.held.get(position, ()) if number not in writes)
            reads = tuple(dict.fromkeys((*map(self.lives.place_of, reads), *held)))
        return Op(
            name=f"{call.func.overloadpacket.__name__}_{position}",
            phase=Phase.BACKWARD if call.in_backward else Phase.FORWARD,
            reads=reads,
            writes=writes,
            keep_reason=keep_reason,
            module=call.module,
            source=self._source(call.place) if call.place else "",
            **facts,
        )

    def _source(self, place: Place) -> str:
        found = self.sources.get(id(place))  # a recording has each place once, and its code is slow to hash
        if found is None:
            found = self.sources[id(place)] = source_of(place)
        return found

    def _unpackings(self) -> dict[int, list[Unpacking]]:
        """Return what the backward asks for by the position of the op before which it does.

        An op in place saves a clone of what it changes, which counts as a node of its own: it comes first, as in the
        order of nodes, although the op asks for it last.
        """
        calls = self.recording.calls
        found: dict[int, list[Unpacking]] = defaultdict(list)
        for unpacking in self.recording.unpackings:
            later = range(unpacking.position, len(calls) if unpacking.position >= self.backward_starts else 0)
            position = next((p for p in later if calls[p].runs), unpacking.position)
            found[position].append(unpacking)
        return {position: sorted(asked, key=lambda one: -one.node) for position, asked in found.items()}

    def _repeat(self, positions: Sequence[int]) -> None:
        """Add the op that runs some calls again as one."""
        repeats = tuple(self.op_of_call[position] for position in positions)
        ops = [self.ops[index] for index in repeats]
        writes = tuple(storage for op in ops for storage in op.writes)
        reads = dict.fromkeys(storage for op in ops for storage in op.reads)
        op = Op(
            f"{ops[0].name}_to_{positions[-1]}",
            ops[0].target,
            Phase.FORWARD,
            tuple(storage for storage in reads if storage not in writes),
            writes,
            module=ops[0].module,
            source=ops[0].source,
            signature="; ".join(op.signature for op in ops),
            flops=sum(op.flops for op in ops),
            repeats=repeats,
        )
        self._add(op, calls=tuple(positions))

    def _add(self, op: Op, *, calls: tuple[int, ...] = (), node: int | None = None) -> None:
        self.ops.append(op)
        self.calls.append(calls)
        # Nodes run in descending order of their numbers, give or take: the clock never goes back.
        before = self.clock[-1] if self.clock else -self.last_node
        self.clock.append(before if node is None else max(before, -node))

    def _is_made_in_forward(self, number: int) -> bool:
        producer = self.records[number].producer
        return producer is not None and producer < self.backward_starts

    def _is_held(self, record: StorageRecord) -> bool:
        """Return whether the program holds a storage for good: until the end, or, of the forward, into the backward."""
        if record.freed is None:
            return True
        if record.producer is None:
            return record.is_parameter
        return record.producer < self.backward_starts and not self._lets_go_in_forward(record)

    def _is_watched(self, record: StorageRecord) -> bool:
        """Return whether the life of a storage is known from its beginning, or from that of the step."""
        return record.producer is not None or record.is_given

    def _lets_go_in_forward(self, record: StorageRecord) -> bool:
        return bool(record.let_go) and record.let_go[0] <= self.backward_starts

    def _category(self, record: StorageRecord) -> Category:
        if record.producer is None:
            return Category.PARAMETER if record.is_parameter else Category.INPUT
        if record.producer < self.backward_starts:
            return Category.OUTPUT if self._is_held(record) else Category.ACTIVATION
        return Category.GRADIENT if record.freed is None else Category.TEMPORARY

    def _releases(self) -> dict[int, list[int]]:
        """Return, by position, what the program lets go of there although no call read it last."""
        last_reader: dict[int, int] = {}
        for position, call in enumerate(self.recording.calls[: self.backward_starts]):
            if call.runs:
                last_reader.update(dict.fromkeys((*call.reads, *call.allocates), position))
        releases: dict[int, list[int]] = defaultdict(list)
        for number, record in enumerate(self.records):
            if record.is_given and record.freed is not None and record.freed <= self.backward_starts:
                releases[min(record.freed, self.backward_starts - 1)].append(number)
            if not self._is_made_in_forward(number) or not self._lets_go_in_forward(record):
                continue
            # What nobody differentiates, such as a result that is not used, goes with the nodes that saved it.
            let_go = max(p for p in (*record.let_go, *record.unsaved) if p <= self.backward_starts)
            if let_go - 1 > last_reader[number]:
                releases[min(let_go, self.backward_starts - 1)].append(number)
        return releases

    def _held_in_backward(self) -> dict[int, list[int]]:
        """Return what dies or is let go of in the backward by the call that ran last before."""
        until: dict[int, list[int]] = defaultdict(list)
        for number, record in enumerate(self.records):
            if self._is_made_in_forward(number):
                for position in record.let_go:
                    if position > self.backward_starts:
                        until[position].append(number)
            elif record.freed is not None and not self._is_held(record) and self._is_watched(record):
                until[record.freed].append(number)
        ran = (position if call.runs else -1 for position, call in enumerate(self.recording.calls))
        last_run = [-1, *itertools.accumulate(ran, max)]
        held: dict[int, list[int]] = defaultdict(list)
        for position, storages in until.items():
            held[last_run[position]] += storages
        held[last_run[-1]].append(len(self.records))  # what was not seen
        return held


def _mark(target: str, index: int, phase: Phase, reads: tuple[int, ...]) -> Op:
    return Op(f"{target}_op{index}", target, phase, reads, ())


def _facts(call: Call) -> dict[str, Any]:
    """Return what is the same in the ops of all calls of a kind."""
    return {
        "target": str(call.func),
        "signature": signature_of_call(call.func, call.args, call.kwargs),
        "flops": _flops(call),
        "workspace_bytes": workspace.workspace_bytes(call.func, call.args) if workspace.is_known(call.func) else 0,
    }


def _flops(call: Call) -> int:
    if not has_flops(call.func):
        return 0
    shapes = tree_map_only(Look, lambda look: torch.Size(look.shape), (call.args, call.kwargs, call.made), _is_look)
    return flops_of_call(call.func, *shapes)


def keep_reasons(recording: Recording, backward_starts: int) -> dict[int, str]:
    """Return why calls of the forward may not be repeated alone, by position."""
    last_write = last_writes(recording)
    # Made again, it would be saved beside the stash: the graph of a gradient outlives the node that was handed it.
    saved_again = {unpacking.storage for unpacking in recording.unpackings if unpacking.creates_graph}
    read_early = {unpacking.storage for unpacking in recording.unpackings if unpacking.position < backward_starts}
    overwritten, opaque = recording.log.overwritten, recording.log.opaque
    of_results = ((saved_again, _SAVED_AGAIN), (read_early, _READ_EARLY), (overwritten, _CHANGED_UNSEEN))
    reasons: dict[int, str] = {}
    forward = recording.calls[:backward_starts]
    kinds = {call.kind: call for call in forward}
    of_kind = {k: keep_reason_of_call(c.func, c.args, c.kwargs, on_cuda=_on_cuda(c)) for k, c in kinds.items()}
    for position, call in enumerate(forward):
        reason = of_kind[call.kind]
        if not reason:
            reason = next((why for numbers, why in of_results if not numbers.isdisjoint(call.allocates)), "")
        if not reason and not opaque.isdisjoint((*call.reads, *call.allocates)):
            reason = _OPAQUE
        # Last, because they are no reason where all that changes is repeated together.
        if not reason and any(last_write.get(number, -1) > position for number in call.needs):
            reason = CHANGED_LATER
        if not reason and any(number in last_write for number in call.allocates):
            reason = CHANGED_ITSELF
        if reason:
            reasons[position] = reason
    return reasons


def _on_cuda(call: Call) -> bool:
    return any(look.device.type == "cuda" for look in looks((call.args, call.made)) if look.storage != NO_STORAGE)
