"""Turn a tape of generated code into a `TrainingGraph`: its ops are fused kernels, library calls and operators."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx
from torch.utils._pytree import tree_leaves

from torchecho.capture.describe import describe_argument, module_path, source_line
from torchecho.capture.kernel_tape import Entry, Tape
from torchecho.ir.graph import Category, Op, Phase, Storage, TrainingGraph, Value

_SHARED = "fills its result together with another kernel"
_CHANGED = "reads an input that the forward changes in place"
_CHANGES = "changes its arguments"


@dataclass(frozen=True)
class TapeFacts:
    """What a tape does not say of the step.

    Attributes:
        num_forward_outputs: How many of the forward's outputs are the user's.
        static_inputs: Positions of parameters and buffers among the forward's inputs.
        trained_inputs: Positions of the forward's inputs that get a gradient.
        base_bytes, model_bytes: As in `capture_joint`.
        nodes: The nodes of Dynamo's graph by name, for where in the program a kernel comes from.
    """

    num_forward_outputs: int
    static_inputs: frozenset[int]
    trained_inputs: frozenset[int]
    base_bytes: int
    model_bytes: int
    nodes: Mapping[str, fx.Node]


def graph_of(tape: Tape, facts: TapeFacts) -> TrainingGraph:
    """Return the training graph of a tape: op i is entry i, forward entries first."""
    entries = [*tape.forward, *tape.backward]
    producer = _producers(tape, entries)
    outputs = frozenset(storage for _, storage in tape.forward_outputs[: facts.num_forward_outputs])
    gradients = frozenset(storage for _, storage in tape.backward_outputs)
    handed_out = {**dict.fromkeys(gradients, Category.GRADIENT), **dict.fromkeys(outputs, Category.OUTPUT)}
    storages = [_storage(tape, facts, i, producer.get(i), handed_out.get(i)) for i in range(len(tape.storages))]
    values = tuple(Value(s.name, i, s.shape, s.dtype) for i, s in enumerate(tape.storages))
    reasons = _keep_reasons(tape)
    ops = []
    for position, entry in enumerate(entries):
        phase = Phase.FORWARD if position < len(tape.forward) else Phase.BACKWARD
        made = _op(entry, position, phase, producer, reasons[position] if phase == Phase.FORWARD else "")
        module, source = _place(tape, entry, facts)
        ops.append(replace(made, module=module, source=source))
    own = sum(s.size_bytes for s in storages if s.category in (Category.PARAMETER, Category.BUFFER))
    base_bytes = facts.base_bytes + max(facts.model_bytes - own, 0)
    return TrainingGraph(tuple(ops), values, tuple(storages), base_bytes)


def _producers(tape: Tape, entries: Sequence[Entry]) -> dict[int, int]:
    """Return the first entry that fills each storage; none for storages that are given."""
    producer: dict[int, int] = {}
    for position, entry in enumerate(entries):
        for storage in (*entry.writes, *(made for made, _ in entry.makes)):
            if not tape.storages[storage].is_given:
                producer.setdefault(storage, position)
    return producer


def _storage(tape: Tape, facts: TapeFacts, index: int, producer: int | None, handed_out: Category | None) -> Storage:
    known = tape.storages[index]
    if known.is_given:
        category = _given_category(tape, facts, index)
        held = category != Category.TANGENT or known.shape == ()
        return Storage(known.name, known.size_bytes, category, None, held)
    if handed_out is not None:
        return Storage(known.name, known.size_bytes, handed_out, producer, held=True)
    is_forward = producer is not None and producer < len(tape.forward)
    category = Category.ACTIVATION if is_forward else Category.TEMPORARY
    return Storage(known.name, known.size_bytes, category, producer, held=False)


def _given_category(tape: Tape, facts: TapeFacts, index: int) -> Category:
    if index not in tape.forward_inputs:
        return Category.TANGENT if index in tape.backward_inputs else Category.BUFFER
    position = tape.forward_inputs.index(index)
    if position not in facts.static_inputs:
        return Category.INPUT
    return Category.PARAMETER if position in facts.trained_inputs else Category.BUFFER


def _keep_reasons(tape: Tape) -> list[str]:
    """Return for each forward entry why it may not be called twice."""
    entries = [*tape.forward, *tape.backward]
    writers = Counter(storage for entry in entries for storage in entry.writes)
    given = {index for index, storage in enumerate(tape.storages) if storage.is_given}
    changed = {storage for entry in entries for storage in entry.writes} & given
    return [_keep_reason(entry, writers, given, changed) for entry in tape.forward]


def _keep_reason(entry: Entry, writers: Mapping[int, int], given: set[int], changed: set[int]) -> str:
    if entry.keep_reason:
        return entry.keep_reason
    if given.intersection(entry.writes) or not (entry.writes or entry.makes):
        return _CHANGES
    if changed.intersection(entry.reads):
        return _CHANGED
    return _SHARED if any(writers[storage] > 1 for storage in entry.writes) else ""


def _op(entry: Entry, position: int, phase: Phase, producer: Mapping[int, int], keep_reason: str) -> Op:
    # What a kernel fills itself it may read again through another argument; what others have filled it keeps in part.
    read = dict.fromkeys(s for s in (*entry.reads, *entry.writes) if producer.get(s) != position)
    return Op(
        name=f"{entry.label} {position}",
        target=entry.label,
        phase=phase,
        reads=tuple(read),
        writes=(*entry.writes, *(made for made, _ in entry.makes)),
        keep_reason=keep_reason,
        signature=_signature(entry),
    )


def _place(tape: Tape, entry: Entry, facts: TapeFacts) -> tuple[str, str]:
    """Return module path and source line: of a Dynamo node that the code names, else of a value that is handed on."""
    node = next((facts.nodes[name] for name in reversed(entry.nodes) if name in facts.nodes), None)
    if node is not None:
        return module_path(node), source_line(node)
    filled = (*entry.writes, *(made for made, _ in entry.makes))
    return next((tape.storages[s].place for s in filled if any(tape.storages[s].place)), ("", ""))


def _signature(entry: Entry) -> str:
    """Return the key of a call's cost: its function, and what it is given."""
    leaves = tree_leaves([list(entry.args), dict(entry.kwargs)])
    given = " ".join(describe_argument(leaf) for leaf in leaves)
    return f"inductor {entry.label} {entry.digest} {given}"
