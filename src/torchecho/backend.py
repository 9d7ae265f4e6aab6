"""The compile engine: the backend behind ``torch.compile(model, backend="torchecho")``.

Dynamo hands over a graph, AOTAutograd makes the joint graph of it, and the partitioner of a `Piece` plans and applies.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd

from torchecho.apply.lowering import lower_eager
from torchecho.capture.recurrent import fuse_layers, is_recurrent, split_layers
from torchecho.engine.dynamo import through_dynamo
from torchecho.engine.lowering import choose_lowering
from torchecho.engine.piece import Piece
from torchecho.engine.planning import Surroundings, bytes_of_optimizer
from torchecho.errors import EchoError, OptionError
from torchecho.options import parse_options

_logger = logging.getLogger("torchecho")


def torchecho_backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, object] | None = None, **extra: Any
) -> Callable[..., Any]:
    """Compile a Dynamo graph under a plan; this is what ``backend="torchecho"`` names.

    Args:
        module: Graph that Dynamo captured.
        example_inputs: Fake or real inputs of it.
        options: Options of torchecho, as in ``torch.compile(model, backend="torchecho", options={...})``.
        extra: Other keyword arguments of ``torch.compile``; a ``mode`` has no meaning here.

    Raises:
        OptionError: an option is unknown or its value cannot be used.
        BudgetError: no plan keeps the step inside the budget.
    """
    try:
        if extra.get("mode") not in (None, "default"):
            raise OptionError(f"mode={extra['mode']!r} is Inductor's: with torchecho use options={{...}} instead")
        chosen = parse_options(options or {})
        if chosen.engine == "eager":
            raise OptionError(
                "a backend of torch.compile is the compile engine, found engine='eager':"
                " leave it out, or use torchecho.optimize(model, engine='eager') without torch.compile"
            )
        return compile_piece(module, example_inputs, Surroundings(chosen, optimizer=bytes_of_optimizer(chosen)))
    except EchoError as error:
        raise through_dynamo(error) from error


def compile_piece(
    module: fx.GraphModule, example_inputs: Sequence[Any], surroundings: Surroundings
) -> Callable[..., Any]:
    """Compile one graph: trace the joint graph, plan it, and lower both halves.

    Raises:
        EchoError: an option or the budget cannot be met, or with ``strict`` anything failed inside.
    """
    reason = getattr(module, "compile_subgraph_reason", None)  # Dynamo's: why the graph ends here
    more_follows = bool(getattr(reason, "graph_break", False))
    piece = Piece(surroundings, surroundings.name or _name_of(module), more_follows)
    fuse_layers(module)
    split_layers(module)
    with _tracing(module):
        return _generated(module, example_inputs, piece) or _eager(module, example_inputs, piece)


def _generated(module: fx.GraphModule, example_inputs: Sequence[Any], piece: Piece) -> Callable[..., Any] | None:
    """Lower a graph by Inductor where that is asked for, or reasonable; None where it is not, or fails."""
    surroundings = piece.surroundings
    if not surroundings.may_run:  # kernels cannot run on fake tensors
        return None
    lowering, reason = choose_lowering(module, example_inputs, surroundings.options.lowering)
    if lowering == "inductor":
        from torchecho.engine.generated import compile_generated  # noqa: PLC0415 - importing Inductor takes seconds

        return compile_generated(module, example_inputs, piece)
    if reason:
        _logger.info("%s is lowered eagerly: %s", piece.name, reason)
    return None


def _eager(module: fx.GraphModule, example_inputs: Sequence[Any], piece: Piece) -> Callable[..., Any]:
    compiler = aot_autograd(
        fw_compiler=piece.lower_forward,
        bw_compiler=piece.lower_backward,
        inference_compiler=lower_eager,
        partition_fn=piece.partition,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = compiler(module, example_inputs)
    return compiled


def _name_of(module: fx.GraphModule) -> str:
    for node in module.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            return str(next(iter(stack.values()))[1]).rsplit(".", 1)[-1].rstrip("'>")
    return "step"


@contextlib.contextmanager
def _tracing(module: fx.GraphModule) -> Iterator[None]:
    # Unrolling happens while AOTAutograd traces; with oneDNN on, an LSTM whose input needs no gradient would be traced
    # as an inference-only op (torch._decomp.decompositions.select_one_layer_lstm_function).
    recurrent = any(is_recurrent(node) for node in module.graph.nodes)
    enabled = torch._C._get_mkldnn_enabled()  # noqa: SLF001 - torch.backends.mkldnn.flags() sets precision too
    if recurrent:
        torch._C._set_mkldnn_enabled(False)  # noqa: SLF001 - as above
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)  # noqa: SLF001 - as above


def __getattr__(name: str) -> Any:
    """Return the backend under its entry-point name, and let Dynamo trace recurrent modules from then on.

    ``torch.compile`` gives a backend that is named by a string no other moment before it traces.
    """
    if name != "torchecho":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    dynamo_config.allow_rnn = True
    return torchecho_backend
