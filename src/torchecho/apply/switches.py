"""What a program may switch that kernels look at: a call that is made again must find it as in the forward.

Autocast and whether gradients are enabled are not among these: below autograd they are always the same.

Relies on torch's own functions below the public ones, which cost as much as a small op (torch 2.11 to 2.15). Not
modelled: environment variables, and what a library other than torch switches.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

Switches = tuple[Any, ...]
_Access = tuple[Callable[[], Any], Callable[[Any], object]]


def read() -> Switches:
    """Return how all switches are."""
    return tuple([get() for get, _ in _all()])


def put(wanted: Switches) -> None:
    """Set the switches that are not as they are wanted."""
    for (get, set_one), value in zip(_all(), wanted, strict=True):
        if get() != value:
            set_one(value)


@functools.cache
def _all() -> tuple[_Access, ...]:
    """Return what reads and what sets each switch."""
    own: Any = torch._C
    everywhere: tuple[_Access, ...] = (
        (own._get_mkldnn_enabled, own._set_mkldnn_enabled),
        (_deterministic, _set_deterministic),
        (torch.get_default_dtype, own._set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        _precision("generic", "all"),  # before what takes its precision from it: else that would get one of its own
        _precision("mkldnn", "all"),
        *(_precision("mkldnn", op) for op in ("matmul", "conv", "rnn")),
    )
    if not torch.backends.cuda.is_built():
        return everywhere
    matmul: Any = torch.backends.cuda.matmul
    reductions = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    return (
        *everywhere,
        (own._get_cudnn_enabled, own._set_cudnn_enabled),
        (own._get_cudnn_benchmark, own._set_cudnn_benchmark),
        (own._get_cudnn_deterministic, own._set_cudnn_deterministic),
        *(_precision("cuda", op) for op in ("all", "matmul", "conv", "rnn")),
        *((functools.partial(getattr, matmul, name), functools.partial(setattr, matmul, name)) for name in reductions),
    )


def _deterministic() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(mode[0], warn_only=mode[1])


def _precision(backend: str, op: str) -> _Access:
    own: Any = torch._C
    get = functools.partial(own._get_fp32_precision_getter, backend, op)
    return get, functools.partial(own._set_fp32_precision_setter, backend, op)
