"""Measure single ops: each runs alone, on tensors made to look like its arguments."""

import contextlib
import logging
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OperatorBase, OpOverload  # private: the only names of the types of ops
from torch.utils._python_dispatch import _disable_current_modes  # private: no public way to leave a fake mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchecho.devices import device_among
from torchecho.errors import MeasureError
from torchecho.meter.probe import PeakProbe, probe_available, resolve_device
from torchecho.meter.profiler import profiled_events

_logger = logging.getLogger("torchecho")

# Ops of other libraries may talk to other processes or change state; they are never run on made-up data.
_SAFE_NAMESPACES = frozenset({"aten", "prims", "torchecho"})
_BLOCK_ELEMENTS = 1 << 16
_MIN_RUNS = 3
_MAX_RUNS = 100


def measure_op(
    target: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], *, budget_seconds: float = 0.02
) -> tuple[float, int] | None:
    """Run an op alone and return its seconds and workspace bytes.

    Arguments may hold fake or real tensors, nested; each is replaced by a new real one of the same size, strides, dtype
    and device: floats random in (0, 1), integers 0, booleans False. The streams of random numbers stay as they were.
    The workspace is the peak of live bytes above the start, less what the op leaves allocated (its outputs). Seconds
    are the least of a few runs with warm caches, so small ops look faster than in a step that has just used other data.

    Args:
        target: The op. Views are not run and cost nothing.
        args: Positional arguments.
        kwargs: Keyword arguments.
        budget_seconds: Stop timing after about this long; even the slowest op runs twice.

    Returns:
        Seconds and bytes; None when the op cannot run alone, or is of a library that torchecho does not know.
    """
    if _is_view(target):
        return 0.0, 0
    if not _may_run(target):
        return None
    try:
        with _quiet_state(_cuda_devices(args, kwargs)):
            real_args, real_kwargs = _real_arguments(args, kwargs)
            _fill_batch_sizes(target, real_args)
            device = _device_of(real_args, real_kwargs)
            return _measure(lambda: target(*real_args, **real_kwargs), device, budget_seconds)
    except Exception as error:  # noqa: BLE001 - an op may fail on made-up data in any way; its cost is then estimated
        _logger.debug("cannot measure %s alone: %r", target, error)
        return None


def _measure(run: Callable[[], object], device: torch.device, budget_seconds: float) -> tuple[float, int]:
    run()  # libraries allocate what they keep, and try what is the fastest, at the first call
    seconds, workspace_bytes = _weighed_run(run, device)
    spent_seconds, runs = seconds, 1
    while runs < _MAX_RUNS and (runs < _MIN_RUNS or spent_seconds < budget_seconds):
        if runs * seconds > budget_seconds:
            break
        latest = _one_run(run, device)
        seconds, spent_seconds, runs = min(seconds, latest), spent_seconds + latest, runs + 1
    return seconds, workspace_bytes


def _weighed_run(run: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Return the seconds of one run, and its peak above the start less what stays allocated."""
    if not probe_available(device):
        has_counter = device.type == "cpu"
        return _one_run(run, device), _profiled_workspace_bytes(run) if has_counter else 0
    outputs: list[object] = []
    with PeakProbe(device) as probe:
        seconds = _one_run(lambda: outputs.append(run()), device)
        workspace_bytes = probe.read() - max(0, probe.kept_bytes)
    return seconds, max(0, workspace_bytes)


def _profiled_workspace_bytes(run: Callable[[], object]) -> int:
    outputs: list[object] = []
    live = peak = 0
    for delta in profiled_events(lambda: outputs.append(run()), warmup=0):
        live += delta
        peak = max(peak, live)
    return peak - max(0, live)


def _one_run(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3
    start_seconds = time.perf_counter()
    run()
    return time.perf_counter() - start_seconds


def _is_view(target: Callable[..., object]) -> bool:
    if target is operator.getitem:
        return True
    returns = target._schema.returns if isinstance(target, OpOverload) else ()  # noqa: SLF001 - no public way
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _may_run(target: Callable[..., object]) -> bool:
    if isinstance(target, OpOverload):
        return target.namespace in _SAFE_NAMESPACES
    return not isinstance(target, OperatorBase)


@contextlib.contextmanager
def _quiet_state(cuda_devices: list[int]) -> Iterator[None]:
    """Run outside autocast and tracing modes, and leave the streams of random numbers as they were.

    Gradients are enabled, below autograd: some kernels then make what their backward needs, as they do in a forward.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())  # noqa: SLF001 - no public way
        for kind in ("cpu", "cuda") if cuda_devices else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.random.fork_rng(devices=cuda_devices))
        yield


def _real_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments with tensors and symbolic sizes made real; one that stands twice is made once."""
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    made: dict[int, Any] = {}
    for leaf in leaves:
        if id(leaf) not in made:
            made[id(leaf)] = _real_tensor(leaf) if isinstance(leaf, torch.Tensor) else _real_number(leaf)
    real_args, real_kwargs = tree_unflatten([made[id(leaf)] for leaf in leaves], structure)
    return real_args, real_kwargs


def _fill_batch_sizes(target: Callable[..., object], real_args: Sequence[Any]) -> None:
    """Let the batch sizes of a packed sequence, as torchecho's layers take them, add up to its rows.

    The first step has the whole batch, and the others share the rest evenly: real ones are not known, only their sum.
    """
    if not isinstance(target, OpOverload) or target.namespace != "torchecho":
        return
    names = [argument.name for argument in target._schema.arguments]  # noqa: SLF001 - no public way
    given = dict(zip(names, real_args, strict=False))
    sizes = given.get("batch_sizes")
    if not isinstance(sizes, torch.Tensor) or not len(sizes):
        return
    rows, batch, steps = len(given["x"]), given["h0"].shape[1], len(sizes)
    share, more = divmod(rows - batch, max(steps - 1, 1))
    sizes[0] = batch
    sizes[1:] = share
    sizes[1 : 1 + more] += 1


def _real_number(leaf: Any) -> Any:
    """Return the value that a symbolic number had in the example; anything else as it is."""
    if not isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return leaf
    hint = leaf.node.hint
    if hint is None:
        raise MeasureError(f"the size {leaf} is known only when the step runs")
    return hint


def _real_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same size, strides, dtype and device on a storage of just the size needed."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise MeasureError(f"cannot make a tensor of layout {tensor.layout}")
    size = [int(_real_number(n)) for n in tensor.shape]
    stride = [int(_real_number(n)) for n in tensor.stride()]
    elements = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    made = _filled(elements, tensor.dtype, tensor.device).as_strided(size, stride)
    made = made.conj() if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made  # noqa: SLF001 - no public way to make such a view


def _filled(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(elements, dtype=dtype, device=device)
    # One random block repeated: drawing every element of a large tensor would take longer than the op.
    block = torch.rand(min(elements, _BLOCK_ELEMENTS), device=device).to(dtype)
    filled = torch.empty(elements, dtype=dtype, device=device)
    blocks = elements // _BLOCK_ELEMENTS
    rest = filled[blocks * _BLOCK_ELEMENTS :]
    if blocks:
        filled[: blocks * _BLOCK_ELEMENTS].view(blocks, _BLOCK_ELEMENTS).copy_(block)
    rest.copy_(block[: rest.numel()])
    return filled


def _devices(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.device]:
    """Devices of the tensors, then those named, as in calls that make a tensor."""
    leaves = tree_flatten((tuple(args), dict(kwargs)))[0]
    of_tensors = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    named = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    return list(dict.fromkeys(of_tensors + named))


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the accelerator among the arguments, else the CPU (a scalar tensor on the CPU may stand beside)."""
    return device_among(_devices(args, kwargs))


def _cuda_devices(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    devices = [device for device in _devices(args, kwargs) if device.type == "cuda"]
    return [resolve_device(device).index for device in devices]
