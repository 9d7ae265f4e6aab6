"""Choose how a graph is lowered: generated code where it pays in reasonable time, else op by op."""

import functools
import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import fx

from torchecho.capture.describe import hint
from torchecho.capture.recurrent import is_recurrent
from torchecho.options import Lowering

_logger = logging.getLogger("torchecho")

Chosen = Literal["inductor", "eager"]

# Inductor takes 0.04 to 0.09 s a call of Dynamo's graph on two shared cores: a transformer of 657 calls 39 s, a loop
# over an LSTM cell of 800 calls 72 s, where the eager lowering is ready in 15 and 20 s.
_MOST_CALLS = 1000
_CALLS_PER_TIME_STEP = 20


def choose_lowering(module: fx.GraphModule, example_inputs: Sequence[Any], asked: Lowering) -> tuple[Chosen, str]:
    """Return the lowering of a graph, and why it is not Inductor's where it is not.

    Args:
        module: Graph that Dynamo captured.
        example_inputs: Fake or real inputs of it.
        asked: The option ``lowering``. ``"inductor"`` is returned whatever speaks against it.
    """
    if asked == "eager":
        return "eager", ""
    reason = why_not_inductor(example_inputs)
    if not reason and (calls := num_calls(module)) > _MOST_CALLS:
        reason = f"generating code for about {calls} calls would take minutes (at most {_MOST_CALLS} by default)"
    return ("eager" if reason and asked == "auto" else "inductor"), reason


def why_not_inductor(example_inputs: Sequence[Any]) -> str:
    """Return what keeps Inductor from lowering a step on these inputs here; empty when nothing does."""
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    device = next((t.device.type for t in tensors if t.device.type != "cpu"), "cpu")
    if device != "cpu":
        return f"generated kernels can be planned on the CPU only, and this graph is on {device}"
    if any(isinstance(value, torch.SymInt) for value in example_inputs):
        return "generated kernels can be planned for fixed sizes only, and this graph has symbolic ones"
    return "" if _has_compiler() else "no C++ compiler was found"


@functools.cache
def _has_compiler() -> bool:
    """Return whether Inductor finds a C++ compiler; asked once in a process."""
    from torch._inductor import cpp_builder, exc  # noqa: PLC0415 - takes a second to import

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except (exc.InvalidCxxCompiler, RuntimeError) as error:
        _logger.debug("no C++ compiler: %s", error)
        return False


def num_calls(module: fx.GraphModule) -> int:
    """Return about how many calls a graph makes, the time steps of recurrent modules unrolled."""
    return sum(_calls_of(node) for node in module.graph.nodes if node.op not in ("placeholder", "output", "get_attr"))


def _calls_of(node: fx.Node) -> int:
    if not is_recurrent(node):
        return 1
    given = node.args[0] if node.args else None
    value = given.meta.get("example_value", given.meta.get("val")) if isinstance(given, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return 1
    weights = node.args[2] if len(node.args) > 2 else ()
    layers = max(len(weights) // 4, 1) if isinstance(weights, (list, tuple)) else 1
    return max(hint(size) for size in value.shape[:2]) * layers * _CALLS_PER_TIME_STEP
