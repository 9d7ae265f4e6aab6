"""Make large synthetic training graphs: a forward that is written down, and the backward that follows from it.

The sizes and seconds are those of the named kind of model at common sizes, in round numbers; no kernel runs.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torchecho.cost.model import OpCosts
from torchecho.ir.graph import Category, Op, Phase, Storage, TrainingGraph, Value

MILLISECOND = 1e-3
MIB = 2**20


class StepBuilder:
    """Collects the ops, values and storages of a training graph in execution order."""

    def __init__(self, name: str = "step", base_bytes: int = 0) -> None:
        self.name = name
        self.base_bytes = base_bytes
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self.seconds: list[float] = []
        self.workspace_bytes: list[int] = []

    def source(self, name: str, size_bytes: int, category: Category = Category.INPUT, *, held: bool = True) -> int:
        """Add a storage that no op makes and return its value."""
        return self._allocate(name, size_bytes, category, None, held=held)

    def op(  # noqa: PLR0913 - the facts of an op, each by name, most left out
        self,
        name: str,
        reads: Sequence[int],
        sizes: Sequence[int],
        *,
        seconds: float = 1.0,
        workspace_bytes: int = 0,
        phase: Phase = Phase.FORWARD,
        category: Category = Category.ACTIVATION,
        held: bool = False,
        target: str = "",
        **facts: str,
    ) -> tuple[int, ...]:
        """Add an op that allocates one storage for each of `sizes` and return the values."""
        index = len(self.ops)
        suffixes = [f"[{i}]" for i in range(len(sizes))] if len(sizes) != 1 else [""]
        writes = tuple(
            self._allocate(name + suffix, size, category, index, held=held)
            for suffix, size in zip(suffixes, sizes, strict=True)
        )
        self.ops.append(Op(name, target or name, phase, tuple(reads), writes, **facts))
        self.seconds.append(seconds)
        self.workspace_bytes.append(workspace_bytes)
        return writes

    def again(self, name: str, repeats: Sequence[int]) -> None:
        """Add the op that runs earlier ops again as one; the forward of such a step is fixed."""
        ops = [self.ops[index] for index in repeats]
        writes = tuple(value for op in ops for value in op.writes)
        reads = dict.fromkeys(value for op in ops for value in op.reads if value not in writes)
        self.ops.append(Op(name, ops[0].target, Phase.FORWARD, tuple(reads), writes, repeats=tuple(repeats)))
        self.seconds.append(sum(self.seconds[index] for index in repeats))
        self.workspace_bytes.append(max(self.workspace_bytes[index] for index in repeats))

    def view(self, name: str, value: int, *, phase: Phase = Phase.FORWARD) -> int:
        """Add an op that makes a view of `value` and return the view."""
        made = self.values[value]
        self.values.append(Value(name, made.storage, made.shape, made.dtype))
        self.ops.append(Op(name, "view", phase, (value,), (len(self.values) - 1,), is_view=True))
        self.seconds.append(0.0)
        self.workspace_bytes.append(0)
        return len(self.values) - 1

    def build(self) -> tuple[TrainingGraph, OpCosts]:
        """Return the graph and the costs of its ops."""
        graph = TrainingGraph(
            tuple(self.ops),
            tuple(self.values),
            tuple(self.storages),
            self.base_bytes,
            self.name,
            forward_is_fixed=any(op.repeats for op in self.ops),
        )
        return graph, OpCosts(tuple(self.seconds), tuple(self.workspace_bytes))

    def _allocate(self, name: str, size_bytes: int, category: Category, producer: int | None, *, held: bool) -> int:
        self.storages.append(Storage(name, size_bytes, category, producer, held))
        self.values.append(Value(name, len(self.storages) - 1, (size_bytes,), "uint8"))
        return len(self.values) - 1


@dataclass(frozen=True)
class Rule:
    """One op of a layer's backward: it reads the layer's gradient and `saved` and makes gradients of `wrt`."""

    wrt: tuple[int, ...]
    saved: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass
class Model:
    """A forward that is being written down; `finish` adds the loss and the backward."""

    builder: StepBuilder
    tape: list[tuple[int, str, Op, tuple[Rule, ...], tuple[int, ...]]] = field(default_factory=list)
    weights: set[int] = field(default_factory=set)

    def weight(self, name: str, size_bytes: int) -> int:
        """Add a parameter."""
        value = self.builder.source(name, size_bytes, Category.PARAMETER)
        self.weights.add(value)
        return value

    def layer(
        self,
        kind: str,
        reads: Sequence[int],
        size_bytes: int,
        seconds: float,
        *rules: Rule,
        passes: Sequence[int] = (),
        module: str = "",
    ) -> int:
        """Add a forward op; its backward is `rules`, and its gradient is also that of `passes`, as of an addition."""
        name = f"{kind}_{len(self.builder.ops)}"
        (value,) = self.builder.op(
            name,
            reads,
            [size_bytes],
            seconds=seconds * MILLISECOND,
            target=kind,
            module=module,
            source=f"model.py:{kind}",
            signature=f"{kind} {size_bytes}",
        )
        self.tape.append((value, kind, self.builder.ops[-1], rules, tuple(passes)))
        return value

    def size(self, value: int) -> int:
        """Return the bytes behind a value."""
        return self.builder.storages[self.builder.values[value].storage].size_bytes

    def finish(self, last: int) -> tuple[TrainingGraph, OpCosts]:
        """Add the loss and the backward of everything written down, newest first."""
        (loss,) = self.builder.op("loss", [last], [4], seconds=0.2 * MILLISECOND, category=Category.OUTPUT, held=True)
        tangent = self.builder.source("tangent", 4, Category.TANGENT, held=False)
        grads = {last: self._grad("loss_backward", "", [tangent, last], [last], 0.2)[0]}
        for value, kind, op, rules, passes in reversed(self.tape):
            grad = grads.pop(value, None)
            if grad is None:
                continue
            for target in passes:
                self._accumulate(grads, target, grad, op.module)
            for rule in rules:
                made = self._grad(f"{kind}_backward", op.module, [grad, *rule.saved], rule.wrt, rule.seconds)
                for target, part in zip(rule.wrt, made, strict=True):
                    self._accumulate(grads, target, part, op.module)
        assert loss >= 0, "the loss is a value of the graph"
        for weight in self.weights & grads.keys():
            self._hand_out(grads[weight])
        return self.builder.build()

    def _hand_out(self, grad: int) -> None:
        storages, index = self.builder.storages, self.builder.values[grad].storage
        storages[index] = replace(storages[index], category=Category.GRADIENT, held=True)

    def _accumulate(self, grads: dict[int, int], target: int, part: int, module: str) -> None:
        if target in grads:
            grads[target] = self._grad("add", module, [grads[target], part], [target], 0.2)[0]
        else:
            grads[target] = part

    def _grad(
        self, kind: str, module: str, reads: Sequence[int], wrt: Sequence[int], seconds: float
    ) -> tuple[int, ...]:
        return self.builder.op(
            f"{kind}_{len(self.builder.ops)}",
            list(dict.fromkeys(reads)),
            [self.size(target) for target in wrt],
            seconds=seconds * MILLISECOND,
            phase=Phase.BACKWARD,
            category=Category.TEMPORARY,
            target=kind,
            module=module,
        )


def transformer(blocks: int, *, unit_bytes: int = 16 * MIB, weight_share: float = 0.1) -> tuple[TrainingGraph, OpCosts]:
    """Return a pre-norm transformer with a gated feed-forward layer: 13 forward ops a block.

    Args:
        blocks: How many.
        unit_bytes: Bytes of one batch of hidden states.
        weight_share: Bytes of a square weight as a share of `unit_bytes`; 0 leaves weights and their gradients out.
    """
    model = Model(StepBuilder(f"transformer {blocks}"))
    x = model.layer("embed", [model.builder.source("tokens", 4096)], unit_bytes, 1.0)
    for block in range(blocks):
        x = _block(model, x, unit_bytes, weight_share, f"layers.{block}")
    return model.finish(x)


def _linear(model: Model, x: int, width: int, seconds: float, unit_bytes: int, share: float, module: str) -> int:
    """Add a matrix product with a weight of `width` units."""
    if not share:
        rules = (Rule((x,), (), seconds),)
        return model.layer("linear", [x], width * unit_bytes, seconds, *rules, module=module)
    square = max(width, model.size(x) // unit_bytes)
    weight = model.weight(f"{module}.weight", int(square * share * unit_bytes))
    rules = (Rule((weight,), (x,), seconds), Rule((x,), (weight,), seconds))
    return model.layer("linear", [x, weight], width * unit_bytes, seconds, *rules, module=module)


def _block(model: Model, x: int, unit: int, share: float, at: str) -> int:
    def norm(value: int, name: str) -> int:
        return model.layer("norm", [value], unit, 0.3, Rule((value,), (value,), 0.5), module=f"{at}.{name}")

    def linear(value: int, width: int, seconds: float, name: str) -> int:
        return _linear(model, value, width, seconds, unit, share, f"{at}.{name}")

    def add(a: int, b: int) -> int:
        return model.layer("add", [a, b], unit, 0.2, passes=(a, b), module=at)

    qkv = linear(norm(x, "norm1"), 3, 6.0, "qkv")
    scores = model.layer("scores", [qkv], 4 * unit, 2.0, Rule((qkv,), (qkv,), 3.0), module=f"{at}.attn")
    p = model.layer("softmax", [scores], 4 * unit, 1.0, Rule((scores,), (), 1.0), module=f"{at}.attn")
    model.tape[-1] = (*model.tape[-1][:3], (Rule((scores,), (p,), 1.0),), ())
    rules = (Rule((p,), (qkv,), 2.0), Rule((qkv,), (p,), 2.0))
    z = model.layer("mix", [p, qkv], unit, 2.0, *rules, module=f"{at}.attn")
    r = add(x, linear(z, 1, 2.0, "out"))
    n = norm(r, "norm2")
    gate, up = linear(n, 4, 8.0, "gate"), linear(n, 4, 8.0, "up")
    act = model.layer("gated", [gate, up], 4 * unit, 0.6, Rule((gate, up), (gate, up), 1.2), module=f"{at}.act")
    return add(r, linear(act, 1, 8.0, "down"))


def lstm_attention(steps: int, *, hidden_bytes: int = 64 * 1024) -> tuple[TrainingGraph, OpCosts]:
    """Return an unrolled LSTM encoder and an LSTM decoder whose every step attends to all of the encoder's."""
    model = Model(StepBuilder(f"lstm {steps}"))
    inputs = [model.builder.source(f"x{t}", hidden_bytes) for t in range(steps)]
    weights = [model.weight(f"{part}.weight", 16 * hidden_bytes) for part in ("encoder", "decoder", "query")]
    h = c = model.builder.source("zeros", hidden_bytes)
    encoded = []
    for x in inputs:
        h, c = _lstm_cell(model, (x, h), c, weights[0], hidden_bytes, "encoder")
        encoded.append(h)
    rules = tuple(Rule((state,), (), 0.01) for state in encoded)
    keys = model.layer("stack", encoded, steps * hidden_bytes, 0.1 * steps / 48, *rules)
    context = model.builder.source("start", hidden_bytes)
    for _ in range(steps):
        h, c = _lstm_cell(model, (context, h), c, weights[1], hidden_bytes, "decoder")
        context = _attend(model, keys, h, weights[2], steps, hidden_bytes)
    return model.finish(context)


def _lstm_cell(
    model: Model, x: tuple[int, int], c: int, weight: int, hidden_bytes: int, module: str
) -> tuple[int, int]:
    def point(kind: str, reads: Sequence[int], *saved: int, own: bool = True) -> int:
        value = model.layer(kind, reads, hidden_bytes, 0.02, module=module)
        keeps = (value,) if own else saved
        model.tape[-1] = (*model.tape[-1][:3], tuple(Rule((r,), keeps, 0.02) for r in reads), ())
        return value

    rules = (Rule((weight,), x, 0.4), *(Rule((part,), (weight,), 0.2) for part in x))
    gates = model.layer("gates", [*x, weight], 4 * hidden_bytes, 0.4, *rules, module=module)
    i, f, o = (point(f"sigmoid{k}", [gates]) for k in "ifo")
    g = point("tanh", [gates])
    keep = point("mul", [f, c], f, c, own=False)
    new = point("mul", [i, g], i, g, own=False)
    c_next = model.layer("add", [keep, new], hidden_bytes, 0.02, passes=(keep, new), module=module)
    shown = point("tanh", [c_next])
    return point("mul", [o, shown], o, shown, own=False), c_next


def _attend(model: Model, keys: int, h: int, weight: int, steps: int, hidden_bytes: int) -> int:
    wide, scale = steps * hidden_bytes, steps / 48
    rules = (Rule((weight,), (h,), 0.1), Rule((h,), (weight,), 0.1))
    query = model.layer("query", [h, weight], hidden_bytes, 0.1, *rules, module="attention")
    rules = (Rule((query,), (), 0.4 * scale),)
    added = model.layer("add_query", [keys, query], wide, 0.6 * scale, *rules, passes=(keys,), module="attention")
    energy = model.layer("energy", [added], wide, 0.9 * scale, module="attention")
    model.tape[-1] = (*model.tape[-1][:3], (Rule((added,), (energy,), 0.9 * scale),), ())
    small = steps * hidden_bytes // 256
    score = model.layer("score", [energy], small, 0.3 * scale, Rule((energy,), (), 0.5 * scale), module="attention")
    share = model.layer("share", [score], small, 0.02, module="attention")
    model.tape[-1] = (*model.tape[-1][:3], (Rule((score,), (share,), 0.02),), ())
    rules = (Rule((share,), (keys,), 0.3 * scale), Rule((keys,), (share,), 0.5 * scale))
    return model.layer("context", [share, keys], hidden_bytes, 0.3 * scale, *rules, module="attention")


def unet(levels: int, convolutions: int, *, unit_bytes: int = 4 * MIB) -> tuple[TrainingGraph, OpCosts]:
    """Return a U-Net: `convolutions` a level on the way down and up, a skip connection a level."""
    model = Model(StepBuilder(f"unet {levels}x{convolutions}"))

    def layer(kind: str, reads: Sequence[int], width: int, seconds: float, at: str) -> int:
        rule = Rule(tuple(reads), tuple(reads), 2 * seconds)
        return model.layer(kind, reads, width * unit_bytes, seconds, rule, module=at)

    x = model.layer("stem", [model.builder.source("image", unit_bytes)], 2 ** (levels + 1) * unit_bytes, 4.0)
    skips = []
    for level in range(levels):
        width = 2 ** (levels - level)
        for _ in range(convolutions):
            x = layer("conv", [x], width, 4.0, f"down.{level}")
        skips.append(x)
        x = layer("pool", [x], width // 2, 0.5, f"down.{level}")
    for level in reversed(range(levels)):
        width = 2 ** (levels - level)
        x = layer("concat", [x, skips[level]], 2 * width, 0.5, f"up.{level}")
        for _ in range(convolutions):
            x = layer("conv", [x], width, 4.0, f"up.{level}")
    return model.finish(x)


def chain(length: int, *, seed: int = 0, unit_bytes: int = MIB) -> tuple[TrainingGraph, OpCosts]:
    """Return a chain of unlike layers: 1 to 10 units and 1 to 10 ms each, at random."""
    draw = random.Random(seed)
    model = Model(StepBuilder(f"chain {length}"))
    x = model.builder.source("input", unit_bytes)
    for index in range(length):
        size, seconds = draw.randint(1, 10) * unit_bytes, draw.uniform(1, 10)
        value = model.layer("layer", [x], size, seconds, module=f"layers.{index}")
        wrt = () if index == 0 else (Rule((x,), (x, value), 2 * seconds),)
        model.tape[-1] = (*model.tape[-1][:3], wrt, ())
        x = value
    return model.finish(x)


FAMILIES: dict[str, tuple[Callable[[int], tuple[TrainingGraph, OpCosts]], float]] = {
    "transformer": (transformer, 37),
    "lstm": (lstm_attention, 64),
    "unet": (lambda n: unet(4, n), 17),
    "chain": (chain, 2),
}
"""Generators by name, each with the ops that one unit of its size makes, about."""


def make(family: str, num_ops: int) -> tuple[TrainingGraph, OpCosts]:
    """Return a graph of about `num_ops` ops."""
    generator, ops_a_unit = FAMILIES[family]
    return generator(max(round(num_ops / ops_a_unit), 1))
