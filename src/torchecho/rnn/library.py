"""The C++ kernels: which variant this processor takes, built at first use, and called through plain structs."""

import ctypes
import functools
import hashlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchecho.compiler import load_library
from torchecho.errors import BuildError, OptionError
from torchecho.rnn.asked import asked_variant

_logger = logging.getLogger("torchecho")
_ROOM = Path(__file__).parent
_SOURCE, _SPEED_SOURCE = _ROOM / "cpp" / "kernels.cpp", _ROOM / "cpp" / "pairs_speed.cpp"
_COMMON = ("-O3", "-std=c++20", "-Wno-psabi", "-fvisibility=hidden")

_WITH_PAIRS, _WITHOUT_PAIRS = "avx512bf16", "avx512"
_AVX512 = ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma")
#: Variants of the kernels, widest first, with the flags that the compiler needs for each.
VARIANTS: dict[str, tuple[str, ...]] = {
    _WITH_PAIRS: (*_AVX512, "-mavx512bf16"),
    _WITHOUT_PAIRS: _AVX512,
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}
_NUMBER, _STRUCT = ctypes.c_int64, ctypes.c_void_p
#: Result and arguments of the functions that take more than a struct.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "panels_size": (_NUMBER, *[_NUMBER] * 3),
    "pack_transposed": (None, *[_NUMBER] * 8),
    "pack_rows": (None, *[_NUMBER] * 8),
    "multiply": (None, _STRUCT, _NUMBER),
    "sum_rows": (None, _STRUCT, _NUMBER),
}
_CLEARLY_FASTER = 1.25  # so that noise does not decide: seen were 0.8 and 2
_FLOPS_A_THREAD = 2e5  # about two microseconds of one core
_CAPABILITY_VARIANTS = {"AVX512": _WITHOUT_PAIRS, "AVX2": "avx2"}


def library() -> ctypes.CDLL | None:
    """Return the kernels for this processor; None, with one logged note, when they cannot be built.

    ``TORCHECHO_RNN_VARIANT`` asks for a variant by name; for ``naive``: no kernels at all; or for ``triton``: Triton's
    kernels for tensors on the CPU too, in its interpreter.
    """
    return _library(asked_variant())


@functools.cache
def widest_variant() -> str:
    """Return the widest variant that this processor runs, by what PyTorch found out about it."""
    variant = _CAPABILITY_VARIANTS.get(torch.backends.cpu.get_cpu_capability(), "portable")
    has_instructions = torch.cpu.get_capabilities().get("avx512_bf16")
    return _WITH_PAIRS if variant == _WITHOUT_PAIRS and has_instructions else variant


@functools.cache
def best_variant() -> str:
    """Return the fastest variant: the widest, but without pairs of bfloat16 where floats are multiplied faster."""
    variant = widest_variant()
    return _WITHOUT_PAIRS if variant == _WITH_PAIRS and not _pairs_pay() else variant


def _pairs_pay() -> bool:
    """Measure, in less than a millisecond, whether pairs are faster: their instructions take one cycle or several."""
    try:
        flags = (*_COMMON, *VARIANTS[_WITH_PAIRS])
        speed = load_library("rnn-pairs-speed", _SPEED_SOURCE, _ROOM.rglob("*.h"), [flags]).torchecho_pairs_speed
    except (BuildError, OSError):
        return False
    speed.restype = ctypes.c_double
    return bool(speed() > _CLEARLY_FASTER)


@functools.cache
def sources_digest() -> str:
    """Return a key of the code of all layers: what a call cost by other code is not known of this."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _ROOM.rglob("*") if path.suffix in (".py", ".h", ".cpp")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def has_pairs(dtype: torch.dtype) -> bool:
    """Return whether the kernels multiply pairs of bfloat16 (cpp/pairs.h) in a layer of a type."""
    return dtype == torch.bfloat16 and (asked_variant() or best_variant()) == _WITH_PAIRS


@functools.cache
def _library(asked: str) -> ctypes.CDLL | None:
    if asked in ("naive", "triton"):
        return None
    if asked and asked not in VARIANTS:
        raise OptionError(f"TORCHECHO_RNN_VARIANT={asked!r} is not one of {', '.join((*VARIANTS, 'naive'))}")
    try:
        return _load(asked or best_variant())
    except (BuildError, OSError) as error:
        _logger.warning(
            "recurrent layers run in plain PyTorch, which is slow: the C++ kernels were not built: %s", error
        )
        return None


def _load(variant: str) -> ctypes.CDLL:
    flags = (*_COMMON, *VARIANTS[variant])
    loaded = load_library(f"rnn-{variant}", _SOURCE, _ROOM.rglob("*.h"), [(*flags, "-fopenmp"), flags])
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(loaded, f"torchecho_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


class Struct(ctypes.Structure):
    """Base of the structs that kernels take: every field is a pointer or a number of 64 bits."""


def numbers(names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    """Return 64-bit fields of the given names, for a struct."""
    return [(name, ctypes.c_int64) for name in names.split()]


def threads_for(flops: float) -> int:
    """Return the threads that work between two meetings is worth: a meeting costs about a microsecond."""
    return max(1, min(torch.get_num_threads(), int(flops / _FLOPS_A_THREAD)))


def pointer(tensor: Tensor | None) -> int:
    """Return the address of a tensor's first element; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def call(name: str, struct: Struct, *others: int) -> None:
    """Call a kernel with a struct and further numbers."""
    getattr(library(), f"torchecho_{name}")(ctypes.byref(struct), *others)


def call_numbers(name: str, *values: int) -> Any:
    """Call a function that takes nothing but pointers and 64-bit numbers."""
    return getattr(library(), f"torchecho_{name}")(*values)
