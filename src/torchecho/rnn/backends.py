"""Which of several ways to compute a product is the fastest: measured once for a shape, kept in the cache folder."""

import functools
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchecho.cache import cache_folder, locked, read_json, write_json
from torchecho.rnn.library import sources_digest

_logger = logging.getLogger("torchecho")
_KIND = "rnn-products/3"
_RUNS = 5
_FEWEST_FLOPS = 50e6  # below this a product takes less than a millisecond and is not worth measuring
_CLEARLY_FASTER = 1.1  # so that noise does not decide


#: One way to compute a product: takes the result, the operands, a bias or none, and whether to add to the result.
Product = Callable[[Tensor, Tensor, Any, Tensor | None, bool], None]
Operands = tuple[Tensor, Any, Tensor | None]


class Shape(NamedTuple):
    """What the speed of a product depends on."""

    rows: int
    depth: int
    columns: int
    transposed: tuple[bool, bool]  # the left and the right operand in memory
    threads: int


@functools.cache
def _key(shape: Shape) -> str:
    """Return the name under which the choice is kept, with these kernels; rows are rounded to a power of 2."""
    sizes = f"{2 ** max(shape.rows - 1, 0).bit_length()}x{shape.depth}x{shape.columns}"
    layout = "".join("t" if flipped else "n" for flipped in shape.transposed)
    return f"{sizes}-{layout}-{shape.threads}-{torch.backends.cpu.get_cpu_capability()}-{sources_digest()}"


def choose(shape: Shape, out: Tensor, ways: Mapping[str, Product], operands: Operands) -> Product:
    """Return the fastest way; the first one unless another is clearly faster.

    Args:
        shape: What is computed.
        out: Like what is written; measuring writes to a tensor of its own.
        ways: The ways by name.
        operands: Left and right operand and the bias, for measuring.
    """
    first = next(iter(ways.values()))
    if 2.0 * shape.rows * shape.depth * shape.columns < _FEWEST_FLOPS:
        return first
    chosen = _choices()
    key = _key(shape)
    if key not in chosen:
        chosen[key] = _fastest(out, ways, operands)
        _remember(chosen)
    return ways.get(chosen[key], first)


def _fastest(out: Tensor, ways: Mapping[str, Product], operands: Operands) -> str:
    scratch = torch.empty_like(out, memory_format=torch.contiguous_format)
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(_RUNS):  # in turns, so that what else the machine does delays all of them alike
        seconds = {name: min(seconds[name], _seconds(way, scratch, operands)) for name, way in ways.items()}
    first, best = next(iter(ways)), min(seconds, key=lambda name: seconds[name])
    return best if seconds[best] * _CLEARLY_FASTER < seconds[first] else first


def _seconds(way: Product, scratch: Tensor, operands: Operands) -> float:
    start = time.perf_counter()
    way(scratch, *operands, False)
    return time.perf_counter() - start


def _path() -> Path:
    return cache_folder() / "rnn-products.json"


@functools.cache
def _choices() -> dict[str, str]:
    body = read_json(_path(), _KIND) or {}
    return {str(key): str(name) for key, name in body.get("choices", {}).items()}


def _remember(chosen: Mapping[str, str]) -> None:
    path = _path()
    try:
        with locked(path):
            known = (read_json(path, _KIND) or {}).get("choices", {})
            write_json(path, _KIND, {"choices": {**known, **chosen}})
    except OSError as error:
        _logger.info("the fastest products are not kept, %s cannot be written: %s", path, error)
