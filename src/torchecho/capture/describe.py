"""Say where a joint-graph node comes from and what it costs by: module path, source line, cost signature, FLOPs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from torchecho.rnn import workspace
from torchecho.rnn.library import sources_digest


class Look(NamedTuple):
    """How a tensor looks at its storage; a tuple, because a recorded step makes one for each tensor it meets.

    Attributes:
        storage: Number of the storage in the recording.
        is_conj: It is read as the conjugate of what lies there; kernels first make it, in memory of their own.
        is_neg: It is read as the negative of what lies there, likewise.
    """

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_conj: bool = False
    is_neg: bool = False


def looks(value: Any) -> Iterator[Look]:
    """Yield the looks of a recorded call's arguments or results."""
    if type(value) is Look:
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from looks(item)


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
    return signature_of_call(node.target, node.args, node.kwargs)


def signature_of_call(target: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the key of a call's cost, as of a node's; tensors may be stood for by `Look`.

    That of torchecho's own operators changes with their code: costs are kept for longer than a version lasts.
    """
    parts = [_name_of(target), *(describe_argument(argument) for argument in args)]
    parts += [f"{key}={describe_argument(argument)}" for key, argument in sorted(kwargs.items())]
    return " ".join(parts)


def _name_of(target: object) -> str:
    return f"{target} {sources_digest()}" if workspace.is_known(target) else str(target)


def describe_argument(argument: Any) -> str:
    """Return what an argument's cost depends on: a tensor's shape, strides, dtype and device, else its value."""
    if isinstance(argument, fx.Node):
        return describe_argument(argument.meta.get("val"))
    if isinstance(argument, Look):
        look = f"{','.join(map(str, argument.shape))}|{','.join(map(str, argument.strides))}"
        lazy = "conj" * argument.is_conj + "neg" * argument.is_neg
        return f"{str(argument.dtype).removeprefix('torch.')}[{look}]{argument.device.type}{lazy}"
    if isinstance(argument, torch.Tensor):
        shape = ",".join(str(hint(s)) for s in argument.shape)
        strides = ",".join(str(hint(s)) for s in argument.stride()) if argument.layout == torch.strided else "-"
        return f"{str(argument.dtype).removeprefix('torch.')}[{shape}|{strides}]{argument.device.type}"
    if isinstance(argument, (list, tuple)):
        return "(" + " ".join(describe_argument(item) for item in argument) + ")"
    return str(hint(argument)) if isinstance(argument, torch.SymInt) else str(argument)


def flops(node: fx.Node) -> int:
    """Return the FLOPs of a node by torch's own formulas; 0 where there is none."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return flops_of_call(node.target, args, kwargs, node.meta.get("val"))


def has_flops(target: object) -> bool:
    """Return whether torch has a formula for the FLOPs of a target."""
    return getattr(target, "overloadpacket", None) in flop_registry


def flops_of_call(target: object, args: Any, kwargs: Any, made: Any) -> int:
    """Return the FLOPs of a call by torch's own formulas; 0 where there is none. Shapes may stand for tensors."""
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    return 0 if formula is None else hint(formula(*args, **kwargs, out_val=made))


def workspace_bytes(node: fx.Node) -> int:
    """Return the bytes that a node is known to allocate inside and free; 0 where nothing is known."""
    if not workspace.is_known(node.target):
        return 0
    given = fx.map_arg(node.args, lambda n: n.meta.get("val"))
    return workspace.workspace_bytes(node.target, tree_map(_without_symbols, given))


def _without_symbols(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Look(0, tuple(map(hint, value.shape)), (), 0, value.dtype, value.device)
    return hint(value) if isinstance(value, torch.SymInt) else value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a node's value: itself, or the elements of a tuple."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
