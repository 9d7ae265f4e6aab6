"""The text form of a training graph: stable, one line an item, easy to diff and to write by hand.

    graph "step" base=0
    storage 0 "x" 1024 input producer=- held
    value 0 "x" storage=0 shape=4x64 dtype="float32"
    op 0 "tanh" "aten.tanh.default" forward reads=0 writes=1 module="encoder" source="model.py:42"

Storages, values and ops are numbered in order. Facts of an op that are empty, zero or false are left out.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchecho.errors import GraphError
from torchecho.ir.graph import Category, Op, Phase, Storage, TrainingGraph, Value

_TOKEN = re.compile(r'\s*((?:[a-z_]+=)?(?:"(?:[^"\\]|\\.)*"|[^\s"]+))')
_NOTHING = "-"
_STRING_FACTS = ("keep_reason", "module", "source", "signature")


def format_graph(graph: TrainingGraph) -> str:
    """Return a graph as text; `parse_graph` reads it back."""
    optimizer = f" optimizer={graph.optimizer_step_bytes}" if graph.optimizer_step_bytes else ""
    fixed = " fixed" if graph.forward_is_fixed else ""
    lines = [f"graph {_quote(graph.name)} base={graph.base_bytes}{optimizer}{fixed}"]
    lines += [f"storage {i} {_format_storage(storage)}" for i, storage in enumerate(graph.storages)]
    lines += [f"value {i} {_format_value(value)}" for i, value in enumerate(graph.values)]
    clock = [f" clock={tick}" for tick in graph.clock] or [""] * len(graph.ops)
    lines += [f"op {i} {_format_op(op)}{clock[i]}" for i, op in enumerate(graph.ops)]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return json.dumps(text)


def _numbers(numbers: Sequence[int], separator: str) -> str:
    return separator.join(map(str, numbers)) or _NOTHING


def _format_storage(storage: Storage) -> str:
    producer = _NOTHING if storage.producer is None else storage.producer
    held = " held" if storage.held else ""
    return f"{_quote(storage.name)} {storage.size_bytes} {storage.category.value} producer={producer}{held}"


def _format_value(value: Value) -> str:
    shape = _numbers(value.shape, "x")
    return f"{_quote(value.name)} storage={value.storage} shape={shape} dtype={_quote(value.dtype)}"


def _format_op(op: Op) -> str:
    parts = [_quote(op.name), _quote(op.target), op.phase.value]
    parts += [f"reads={_numbers(op.reads, ',')}", f"writes={_numbers(op.writes, ',')}"]
    parts += ["view"] if op.is_view else []
    parts += [f"{name}={_quote(getattr(op, name))}" for name in _STRING_FACTS if getattr(op, name)]
    parts += [f"flops={op.flops}"] if op.flops else []
    parts += [f"workspace={op.workspace_bytes}"] if op.workspace_bytes else []
    parts += [f"repeats={_numbers(op.repeats, ',')}"] if op.repeats else []
    return " ".join(parts)


@dataclass
class _Line:
    """The words of one line: those in place, those with a name, and the flags."""

    words: list[str]
    facts: dict[str, str]
    unused: set[str] = field(default_factory=set)

    def word(self, place: int) -> str:
        if place >= len(self.words):
            raise ValueError(f"word {place + 1} is missing")
        return self.words[place]

    def fact(self, name: str, default: str | None = None) -> str:
        self.unused.discard(name)
        found = self.facts.get(name, default)
        if found is None:
            raise ValueError(f"{name}= is missing")
        return found

    def check_all_used(self) -> None:
        if self.unused:
            raise ValueError(f"unknown fact {min(self.unused)!r}")

    def flag(self, name: str, after: int) -> bool:
        flags = self.words[after:]
        if flags not in ([], [name]):
            raise ValueError(f"unknown word {' '.join(flags)!r}; only {name!r} may stand here")
        return bool(flags)


def parse_graph(text: str) -> TrainingGraph:
    """Read what `format_graph` wrote; empty lines and lines that begin with # are skipped.

    Only the form is checked, not whether the graph makes sense.

    Raises:
        GraphError: a line cannot be read; the message names the line and what was expected.
    """
    name, base_bytes, optimizer_step_bytes, forward_is_fixed = "step", 0, 0, False
    clock: list[int] = []
    storages: list[Storage] = []
    values: list[Value] = []
    ops: list[Op] = []
    readers: dict[str, Callable[[_Line], None]] = {
        "storage": lambda line: storages.append(_parse_storage(line, len(storages))),
        "value": lambda line: values.append(_parse_value(line, len(values))),
        "op": lambda line: ops.append(_parse_op(line, len(ops), clock)),
    }
    for number, raw in enumerate(text.splitlines(), start=1):
        if not raw.strip() or raw.lstrip().startswith("#"):
            continue
        try:
            line = _split(raw, kinds=("graph", *readers))
            if line.word(0) == "graph":
                name, base_bytes = line.word(1), int(line.fact("base"))
                optimizer_step_bytes = int(line.fact("optimizer", "0"))
                forward_is_fixed = line.flag("fixed", 2)
            else:
                readers[line.word(0)](line)
            line.check_all_used()
        except ValueError as error:
            raise GraphError(f"line {number}, {raw.strip()!r}: {error}") from error
    if clock and len(clock) != len(ops):
        raise GraphError(f"{len(clock)} of {len(ops)} ops have a clock=: give all of them one, or none")
    return TrainingGraph(
        tuple(ops),
        tuple(values),
        tuple(storages),
        base_bytes,
        name,
        optimizer_step_bytes,
        forward_is_fixed,
        tuple(clock),
    )


def _split(raw: str, kinds: Sequence[str]) -> _Line:
    words: list[str] = []
    facts: dict[str, str] = {}
    place = 0
    while place < len(raw.rstrip()):
        match = _TOKEN.match(raw, place)
        if match is None:
            raise ValueError(f"cannot read {raw[place:].strip()!r}: a quote is not closed")
        place = match.end()
        key, equals, body = match.group(1).partition("=")
        if equals and not key.startswith('"'):
            facts[key] = _unquote(body)
        else:
            words.append(_unquote(match.group(1)))
    if not words or words[0] not in kinds:
        raise ValueError(f"unknown item {words[:1]}; expected one of {', '.join(kinds)}")
    return _Line(words, facts, set(facts))


def _unquote(body: str) -> str:
    return str(json.loads(body)) if body.startswith('"') else body


def _check_number(line: _Line, expected: int) -> None:
    if line.word(1) != str(expected):
        raise ValueError(f"number {line.word(1)} stands where {expected} is next")


def _parse_numbers(body: str, separator: str) -> tuple[int, ...]:
    return () if body == _NOTHING else tuple(int(part) for part in body.split(separator))


def _parse_storage(line: _Line, number: int) -> Storage:
    _check_number(line, number)
    producer = line.fact("producer")
    return Storage(
        name=line.word(2),
        size_bytes=int(line.word(3)),
        category=Category(line.word(4)),
        producer=None if producer == _NOTHING else int(producer),
        held=line.flag("held", 5),
    )


def _parse_value(line: _Line, number: int) -> Value:
    _check_number(line, number)
    return Value(line.word(2), int(line.fact("storage")), _parse_numbers(line.fact("shape"), "x"), line.fact("dtype"))


def _parse_op(line: _Line, number: int, clock: list[int]) -> Op:
    _check_number(line, number)
    if "clock" in line.facts:
        clock.append(int(line.fact("clock")))
    facts = {name: line.fact(name, "") for name in _STRING_FACTS}
    return Op(
        name=line.word(2),
        target=line.word(3),
        phase=Phase(line.word(4)),
        reads=_parse_numbers(line.fact("reads"), ","),
        writes=_parse_numbers(line.fact("writes"), ","),
        is_view=line.flag("view", 5),
        flops=int(line.fact("flops", "0")),
        workspace_bytes=int(line.fact("workspace", "0")),
        repeats=_parse_numbers(line.fact("repeats", _NOTHING), ","),
        **facts,
    )
