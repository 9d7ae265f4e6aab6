"""Lower a planned joint graph through Inductor, and find out before anything runs how much it will allocate.

A plan reaches Inductor through ``config.custom_partitioner_fn``. What Inductor then does with it (fusion, reordering,
reuse of buffers) shows in the Python code that it generates; a rehearsal generates that code for both halves without
compiling a kernel and runs it on tensors without bytes.

Caches: AOTAutograd's is bypassed, because on a hit it would never ask for a plan; Inductor's cache of compiled graphs,
where the time goes, stays in use: its key holds both planned halves in full.
"""

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx

from torchecho.apply.dry_run import GeneratedHalf, NoCompiler, WorkspaceOf, peak_above_start
from torchecho.errors import ApplyError

Halves = tuple[fx.GraphModule, fx.GraphModule]
Partition = Callable[..., Halves]
Watch = Callable[[Callable[[list[Any]], Any]], Callable[[list[Any]], Any]]


class NoTraining(Exception):
    """The graph has no backward half, so that there is nothing to plan."""


@functools.cache
def _partitioner_type() -> type:
    """Return the class of our partitioner; made at first use, because importing Inductor takes a second."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class PlannedPartitioner(CustomPartitionerFn):  # type: ignore[misc]  # untyped in torch
        """Hands a joint graph to `partition`; pickles, for cache keys, to its digest alone."""

        def __init__(self, digest: str, partition: Partition | None = None) -> None:
            self.digest = digest
            self.partition = partition

        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Halves:
            return (self.partition or default_partition)(gm, joint_inputs, **arguments)

        def __reduce__(self) -> tuple[Any, ...]:
            return _make_partitioner, (self.digest,)

        def uuid(self) -> str:
            return self.digest

    return PlannedPartitioner


def _make_partitioner(digest: str, partition: Partition | None = None) -> Any:
    return _partitioner_type()(digest, partition)


def default_partition(module: fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Halves:
    """Split a joint graph as plain ``torch.compile`` does."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    halves: Halves = min_cut_rematerialization_partition(module, joint_inputs, **{"compiler": "inductor", **arguments})
    return halves


def compile_inductor(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    partition: Partition,
    *,
    digest: str,
    watch_forward: Watch,
    watch_backward: Watch,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, split by `partition`.

    Args:
        module: Graph that Dynamo captured; Inductor may change it.
        example_inputs: Fake or real inputs of it.
        partition: Called as PyTorch calls a partitioner, after Inductor's joint passes.
        digest: Identity of all that the partition depends on besides the graph.
        watch_forward: Wraps what runs a compiled forward half.
        watch_backward: Wraps what runs a compiled backward half.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    def inner(half: fx.GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
        compiled = compile_fx_inner(half, inputs, **arguments)
        if not arguments.get("is_inference") and hasattr(compiled, "current_callable"):
            watch = watch_backward if arguments.get("is_backward") else watch_forward
            compiled.current_callable = watch(compiled.current_callable)
        return compiled

    return _compile(module, example_inputs, _make_partitioner(digest, partition), inner, {}, rehearse=False)


def _compile(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    partitioner: Any,
    inner: Callable[..., Any],
    patches: dict[str, Any],
    *,
    rehearse: bool,
) -> Callable[..., Any]:
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    patches = {"custom_partitioner_fn": partitioner, **patches}
    with functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=rehearse):
        compiled: Callable[..., Any] = compile_fx(module, example_inputs, inner_compile=inner, config_patches=patches)
    return compiled


@dataclass
class _Rehearsal:
    """What is overheard while Inductor compiles for nothing."""

    forward: GeneratedHalf | None = None
    backward: GeneratedHalf | None = None
    num_forward_outputs: int = 0
    last_code: types.ModuleType | None = None
    halves: list[GeneratedHalf] = field(default_factory=list)

    def partition(self, partition: Partition, module: fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Halves:
        if joint_inputs:
            self.num_forward_outputs = arguments["num_fwd_outputs"]
        return partition(module, joint_inputs, **arguments)

    def compile_half(self, half: fx.GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        if arguments.get("is_inference"):
            raise NoTraining
        input_names = tuple(node.name for node in half.graph.find_nodes(op="placeholder"))
        results = half.graph.find_nodes(op="output")[0].args[0]
        output_names = tuple(result.name if isinstance(result, fx.Node) else "" for result in results)
        example_inputs = tuple(inputs)
        compiled = compile_fx_inner(half, inputs, **arguments)
        if self.last_code is None:
            raise ApplyError("Inductor made no Python code to rehearse")
        made = GeneratedHalf(self.last_code, input_names, example_inputs, output_names)
        self.last_code = None
        if arguments.get("is_backward"):
            self.backward = made
        else:
            self.forward = made
        return compiled

    def load(self, key: str, path: str, *args: Any, attrs: dict[str, Any] | None = None, **others: Any) -> Any:
        """Stand in for ``PyCodeCache.load_by_key_path``: load generated code without its kernels."""
        code = types.ModuleType(f"torchecho_rehearsal_{key}")
        code.__file__ = path
        code.__dict__.update(attrs or {})
        with mock.patch("torch._inductor.async_compile.AsyncCompile", NoCompiler):
            exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), code.__dict__)  # noqa: S102 - generated by Inductor just now
        self.last_code = code
        return code


def rehearse(
    module: fx.GraphModule, example_inputs: Sequence[Any], partition: Partition, workspace_of: WorkspaceOf
) -> int:
    """Return the peak of the bytes that a step split by `partition` will allocate under Inductor.

    Nothing runs and no kernel is compiled; `module` stays as it is.

    Raises:
        NoTraining: the graph needs no gradient.
    """
    rehearsal = _Rehearsal()
    partitioner = _make_partitioner("rehearsal", functools.partial(rehearsal.partition, partition))
    patches = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    with mock.patch("torch._inductor.codecache.PyCodeCache.load_by_key_path", rehearsal.load):
        _compile(copy_of(module), example_inputs, partitioner, rehearsal.compile_half, patches, rehearse=True)
    if rehearsal.forward is None or rehearsal.backward is None:
        raise ApplyError("Inductor compiled only one half of the graph")
    return peak_above_start(
        rehearsal.forward,
        rehearsal.backward,
        num_forward_outputs=rehearsal.num_forward_outputs,
        workspace_of=workspace_of,
    )


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
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
