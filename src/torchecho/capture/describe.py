"""Say where a joint-graph node comes from and what it costs by: module path, source line, cost signature, FLOPs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCHECHO = str(Path(__file__).parents[1])
_ROOT = re.compile(r"^[LG]\[['\"]\w+['\"]\]\.?")
_MODULE_KEY = re.compile(r"\._modules\[['\"]([^'\"]+)['\"]\]")


def hint(size: Any) -> int:
    """Return the number behind a size: itself, or the example value of a symbolic one (0 when it has none)."""
    if isinstance(size, torch.SymInt):
        known = size.node.hint
        return 0 if known is None else int(known)
    return int(size)


def module_path(node: fx.Node) -> str:
    """Return the dotted path of the module that a node comes from; empty when unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = _MODULE_KEY.sub(r".\1", path)
    return _ROOT.sub("", path).strip(".")


def source_line(node: fx.Node) -> str:
    """Return ``file.py:line`` of the training code behind a node: the innermost frame outside torch and torchecho."""
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in found if not frame[0].startswith(_TORCHECHO)]
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def signature(node: fx.Node) -> str:
    """Return the key of a node's cost: the op, and each argument's shape, strides, dtype and device, or its value."""
    parts = [str(node.target), *(describe_argument(argument) for argument in node.args)]
    parts += [f"{key}={describe_argument(argument)}" for key, argument in sorted(node.kwargs.items())]
    return " ".join(parts)


def describe_argument(argument: Any) -> str:
    """Return what an argument's cost depends on: a tensor's shape, strides, dtype and device, else its value."""
    if isinstance(argument, fx.Node):
        return describe_argument(argument.meta.get("val"))
    if isinstance(argument, torch.Tensor):
        shape = ",".join(str(hint(s)) for s in argument.shape)
        strides = ",".join(str(hint(s)) for s in argument.stride()) if argument.layout == torch.strided else "-"
        return f"{str(argument.dtype).removeprefix('torch.')}[{shape}|{strides}]{argument.device.type}"
    if isinstance(argument, (list, tuple)):
        return "(" + " ".join(describe_argument(item) for item in argument) + ")"
    return str(hint(argument)) if isinstance(argument, torch.SymInt) else str(argument)


def flops(node: fx.Node) -> int:
    """Return the FLOPs of a node by torch's own formulas; 0 where there is none."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return hint(formula(*args, **kwargs, out_val=node.meta.get("val")))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a node's value: itself, or the elements of a tuple."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
