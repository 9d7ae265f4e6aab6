"""Compile a Dynamo graph with Inductor and keep hold of what it generates, so that a plan can be put in its place.

Inductor compiles the step once, split as plain ``torch.compile`` splits it. A plan then decides which of the generated
kernels run again. It never changes what a kernel computes. The choice of saved values would: Inductor fuses kernels,
orders sums and picks vector code by it.

Caches: AOTAutograd's is bypassed, because on a hit it would hand over no code to plan; Inductor's own, where the time
goes, is used, and its entries hold nothing of a plan.
"""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from torchecho.capture.describe import module_path, source_line
from torchecho.capture.fx import capture_joint
from torchecho.capture.kernel_tape import GeneratedHalf
from torchecho.errors import ApplyError
from torchecho.ir.graph import Phase

Halves = tuple[fx.GraphModule, fx.GraphModule]
Run = Callable[[list[Any]], Any]

# Kernels write to buffers of their own: what a kernel writes over cannot be made again by calling another.
_SETTINGS = {
    "inplace_buffers": False,
    "allow_buffer_reuse": False,
    "memory_planning": False,
    "cpp_wrapper": False,
    "graph_partition": False,
    "triton.cudagraphs": False,
}


@dataclass
class Generated:
    """A compiled step and the code of its halves.

    Attributes:
        run: Runs the step as Inductor compiled it, or as `replace` says.
        forward, backward: None when the graph needs no gradient.
        num_forward_outputs: How many of the forward's outputs are the user's.
        static_inputs: Positions of parameters and buffers among the forward's inputs.
    """

    run: Any = None
    forward: GeneratedHalf | None = None
    backward: GeneratedHalf | None = None
    num_forward_outputs: int = 0
    static_inputs: frozenset[int] = frozenset()
    compiled: dict[str, Any] = field(default_factory=dict)

    def replace(self, forward: Run, backward: Run) -> None:
        """Let these functions run instead of the compiled halves."""
        self.compiled["forward"].current_callable = forward
        self.compiled["backward"].current_callable = backward


def compile_inductor(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Generated:
    """Compile a Dynamo graph with Inductor, forward and backward at once.

    Args:
        module: Graph that Dynamo captured; Inductor may change it.
        example_inputs: Fake or real inputs of it.

    Raises:
        ApplyError: Inductor made no Python code.
    """
    listener = _Listener()
    load = PyCodeCache.load_by_key_path
    patches = {**_SETTINGS, "custom_partitioner_fn": _Partitioner(listener.partition)}
    with (
        functorch_config.patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=True, donated_buffer=False
        ),
        mock.patch("torch._inductor.codecache.PyCodeCache.load_by_key_path", functools.partial(listener.load, load)),
    ):
        listener.made.run = compile_fx(
            module, example_inputs, inner_compile=listener.compile_half, config_patches=patches
        )
    return listener.made


@dataclass
class _Listener:
    """Overhears a compilation."""

    made: Generated = field(default_factory=Generated)
    loaded: list[tuple[str, types.ModuleType, Mapping[str, Any]]] = field(default_factory=list)

    def partition(self, module: fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Halves:
        if not joint_inputs:
            return _untouched(module, joint_inputs, **arguments)
        self.made.num_forward_outputs = arguments["num_fwd_outputs"]
        self.made.static_inputs = frozenset(arguments.get("static_lifetime_input_indices") or ())
        return _with_all_inputs_saved(_split(module, joint_inputs, arguments), self.made.num_forward_outputs)

    def load(self, load: Callable[..., Any], key: str, path: str, *args: Any, **others: Any) -> Any:
        module = load(key, path, *args, **others)
        self.loaded.append((path, module, others.get("attrs") or {}))
        return module

    def compile_half(self, half: fx.GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
        input_names = tuple(node.name for node in half.graph.find_nodes(op="placeholder"))
        results = half.graph.find_nodes(op="output")[0].args[0]
        output_names = tuple(result.name if isinstance(result, fx.Node) else "" for result in results)
        places = tuple((module_path(r), source_line(r)) if isinstance(r, fx.Node) else ("", "") for r in results)
        example_inputs = tuple(inputs)
        self.loaded.clear()
        compiled = compile_fx_inner(half, inputs, **arguments)
        if arguments.get("is_inference"):
            return compiled
        if not self.loaded or not hasattr(compiled, "current_callable"):
            raise ApplyError("Inductor made no Python code for the graph")
        path, module, constants = self.loaded[-1]
        made = GeneratedHalf(path, module, constants, input_names, example_inputs, output_names, places)
        _forbid_donation()
        if arguments.get("is_backward"):
            self.made.backward, self.made.compiled["backward"] = made, compiled
        else:
            self.made.forward, self.made.compiled["forward"] = made, compiled
        return compiled


def _forbid_donation() -> None:
    """Say that the backward writes over nothing that is saved, so that it may run again over a retained graph."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


class _Partitioner(CustomPartitionerFn):
    """Splits a joint graph by `partition`; in cache keys it is a constant, for both halves are in them in full."""

    def __init__(self, partition: Callable[..., Halves] | None = None) -> None:
        self.partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Halves:
        return (self.partition or _untouched)(gm, joint_inputs, **arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Partitioner, ()

    def uuid(self) -> str:
        return "torchecho 1"


def _untouched(module: fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Halves:
    """Split a joint graph as plain ``torch.compile`` does."""
    return min_cut_rematerialization_partition(module, joint_inputs, **{"compiler": "inductor", **arguments})


def _split(module: fx.GraphModule, joint_inputs: Any, arguments: Mapping[str, Any]) -> Halves:
    """Split as plain ``torch.compile`` does; stash everything where that repeats what may not be repeated."""
    static = arguments.get("static_lifetime_input_indices")
    num_forward_outputs = arguments["num_fwd_outputs"]
    capture = capture_joint(module, num_forward_outputs=num_forward_outputs, static_indices=static)
    kept = {op.name for op in capture.graph.ops if op.phase == Phase.FORWARD and op.keep_reason}
    stashing = _twin(module)
    halves = _untouched(module, joint_inputs, **arguments)
    calls = [{n.name for n in half.graph.nodes if n.op == "call_function"} for half in halves]
    if not kept & calls[0] & calls[1]:
        return halves
    return default_partition(
        stashing, joint_inputs, num_fwd_outputs=num_forward_outputs, static_lifetime_input_indices=static
    )


def _twin(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {})
    made = graph.output(output)
    made.meta = dict(module.graph.find_nodes(op="output")[0].meta)
    return fx.GraphModule(module, graph)


def _with_all_inputs_saved(halves: Halves, num_forward_outputs: int) -> Halves:
    """Save every input that is not saved yet: a recomputed kernel may read it, and it costs no memory."""
    forward, backward = halves
    output = forward.graph.find_nodes(op="output")[0]
    results = list(output.args[0])
    saved, changed = set(results[num_forward_outputs:]), _changed_inputs(forward)
    inputs = forward.graph.find_nodes(op="placeholder")
    added = [n for n in inputs if n not in saved | changed and isinstance(n.meta.get("val"), torch.Tensor)]
    first = next(iter(backward.graph.nodes))
    for node in added:
        with backward.graph.inserting_before(first):
            twin = backward.graph.placeholder(node.name)
        twin.meta = dict(node.meta)
    output.args = ((*results[:num_forward_outputs], *added, *results[num_forward_outputs:]),)
    descriptions = list(output.meta.get("desc", ()))
    if len(descriptions) == len(results):
        described = [node.meta.get("desc") for node in added]
        output.meta["desc"] = [*descriptions[:num_forward_outputs], *described, *descriptions[num_forward_outputs:]]
    forward.recompile()
    backward.recompile()
    return forward, backward


def _changed_inputs(forward: fx.GraphModule) -> set[fx.Node]:
    calls = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return {node.args[0] for node in calls}
