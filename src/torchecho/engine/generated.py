"""The Inductor lowering of one graph: compile it, plan over the generated kernels, and run the plan."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torchecho.apply.inductor import Generated, compile_inductor
from torchecho.apply.kernel_tape import TapedStep, apply_to_tape
from torchecho.capture.kernel_graph import TapeFacts, graph_of
from torchecho.capture.kernel_tape import Tape
from torchecho.capture.recorder import record
from torchecho.capture.stash_modes import alternatives, is_open
from torchecho.engine.lowering import why_not_inductor
from torchecho.engine.notice import warn
from torchecho.engine.piece import Piece, with_modes_note
from torchecho.engine.planning import plan_alternatives
from torchecho.errors import ApplyError, BudgetError, EchoError, OptionError
from torchecho.meter.pricing import OpCall


def compile_generated(module: fx.GraphModule, example_inputs: Sequence[Any], piece: Piece) -> Callable[..., Any] | None:
    """Compile a Dynamo graph with Inductor and run it under a plan over the kernels that it generates.

    Returns:
        What runs the step; None, after one warning, when the generated code cannot be planned.

    Raises:
        BudgetError: no plan keeps the step inside the budget.
        EchoError: with ``strict``, anything failed.
    """
    try:
        _check(example_inputs)
        return _compiled(_copy_of(module), example_inputs, piece)
    except (BudgetError, OptionError):
        raise
    except Exception as error:  # whatever fails in here must not break the training: there is another lowering
        if piece.surroundings.options.strict:
            raise EchoError(f"lowering {piece.name} by Inductor failed: {error}") from error
        warn(f"{piece.name} is lowered eagerly: Inductor's code cannot be planned ({type(error).__name__}: {error})")
        return None


def _check(example_inputs: Sequence[Any]) -> None:
    if reason := why_not_inductor(example_inputs):
        raise ApplyError(reason)


def _compiled(module: fx.GraphModule, example_inputs: Sequence[Any], piece: Piece) -> Callable[..., Any]:
    nodes = {node.name: node for node in module.graph.nodes}
    generated = compile_inductor(module, example_inputs)
    if generated.forward is not None and generated.backward is not None:
        step = _planned(generated, nodes, piece)
        cpu = torch.device("cpu")
        generated.replace(piece.watched_forward(step.forward, cpu), piece.watched_backward(step.backward))
    run: Callable[..., Any] = generated.run
    return run


def _planned(generated: Generated, nodes: dict[str, fx.Node], piece: Piece) -> TapedStep:
    assert generated.forward is not None
    assert generated.backward is not None
    as_compiled = record(generated.forward, generated.backward)
    choices = alternatives(sum(is_open(entry.function, entry.args) for entry in as_compiled.forward))
    gradients = [text for text, _ in as_compiled.backward_outputs]
    facts = TapeFacts(
        num_forward_outputs=generated.num_forward_outputs,
        static_inputs=generated.static_inputs,
        trained_inputs=frozenset(i for i, text in enumerate(gradients) if text != "None"),
        base_bytes=piece.base_bytes,
        model_bytes=piece.surroundings.model_bytes,
        nodes=nodes,
    )
    tapes = [record(generated.forward, generated.backward, modes) if modes else as_compiled for modes in choices]
    graphs = [graph_of(tape, facts) for tape in tapes]
    place, plan = plan_alternatives(
        ((graph, functools.partial(_call_of, tape)) for graph, tape in zip(graphs, tapes, strict=True)),
        torch.device("cpu"),
        piece.surroundings,
        name=piece.name,
        part=piece.part,
    )
    tape, graph, plan = tapes[place], graphs[place], with_modes_note(plan, choices[place])
    step = apply_to_tape(tape, graph, plan.schedule, generated.num_forward_outputs)
    piece.take(dataclasses.replace(plan, lowering="inductor"), graph.fixed_bytes)
    return step


def _call_of(tape: Tape, index: int) -> OpCall:
    entry = [*tape.forward, *tape.backward][index]
    return entry.function, entry.args, entry.kwargs


def _copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy that Inductor may change; tensors are shared, and what Dynamo told AOTAutograd goes along."""
    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    copied.meta = dict(module.meta)
    _carry(module, copied, "_param_name_to_source")
    for node, twin in zip(module.graph.nodes, copied.graph.nodes, strict=True):
        _carry(node, twin, "_dynamo_source")
    return copied


def _carry(source: object, target: object, name: str) -> None:
    if hasattr(source, name):
        setattr(target, name, getattr(source, name))
