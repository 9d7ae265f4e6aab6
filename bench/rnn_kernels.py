"""Compile every Triton kernel of the recurrent layers ahead of time, and tell the registers, spills and shared memory.

Needs Triton but no GPU: Triton brings its own assembler. Run as `python -m bench.rnn_kernels` (`--json FILE`).
"""

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchecho.rnn.cuda.spans import BLOCK
from torchecho.rnn.elman import triton_kernels as elman
from torchecho.rnn.gru import triton_kernels as gru
from torchecho.rnn.lstm import single
from torchecho.rnn.lstm import triton_kernels as lstm
from torchecho.rnn.lstm import triton_sequence as sequence

CAPABILITIES = (80, 90)
DTYPES = ("fp32", "bf16", "fp16")
_INTEGERS = frozenset(("num", "H", "y_stride", "dy_stride", "continuing", "steps", "B"))
_POINTER_BYTES = 16  # torch aligns storages to more, and Triton makes a variant for pointers so aligned


@dataclass(frozen=True)
class Variant:
    """One way to compile a kernel; pointers that are not named otherwise are of the layer's type."""

    family: str
    kernel: Any
    constants: dict[str, Any]
    float32: frozenset[str] = frozenset()
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})
    dtypes: tuple[str, ...] = field(default=DTYPES)

    @property
    def name(self) -> str:
        """Return the name of the family and the kernel."""
        return f"{self.family}.{self.kernel.__name__}"

    def signature(self, dtype: str) -> dict[str, str]:
        """Return the type of each argument for a layer of a type."""
        return {name: self._type_of(name, dtype) for name in self.kernel.arg_names}

    def _type_of(self, name: str, dtype: str) -> str:
        if name in self.constants:
            return "constexpr"
        if name in _INTEGERS:
            return "i32"
        return "*i32" if name == "spans" else "*fp32" if name in self.float32 else f"*{dtype}"


_CELLS = frozenset(("cell", "cells", "before", "c0", "dc"))


def variants() -> Iterator[Variant]:
    """Return what the layers launch."""
    for keep, cells, projected in (
        (1, True, False),
        (2, False, False),
        (0, True, False),
        (0, False, False),
        (0, False, True),
    ):
        constants = {"KEEP": keep, "CELLS": cells, "PROJECTED": projected, "BLOCK": BLOCK}
        yield Variant("lstm", lstm.forward_step, constants, _CELLS)
    for both, cells in ((True, True), (True, False), (False, True)):
        yield Variant("lstm", lstm.rebuild, {"SUM": both, "CELLS": cells, "BLOCK": BLOCK}, _CELLS)
    for flag in (True, False):
        yield Variant("lstm", lstm.backward_step, {"PROJECTED": flag, "BLOCK": BLOCK}, _CELLS)
        yield Variant("gru", gru.forward_step, {"BIAS": True, "KEEP": flag, "BLOCK": BLOCK})
        yield Variant("gru", gru.backward_step, {"BIAS": True, "KEPT": flag, "BLOCK": BLOCK})
        yield Variant("elman", elman.forward_step, {"RELU": flag, "BLOCK": BLOCK})
        yield Variant("elman", elman.backward_step, {"RELU": flag, "BLOCK": BLOCK})
    for units in (16, 32, 64, 100, 128):
        sizes = {"ROWS": single.ROWS, "UNITS": single.padded(units), "H": units}
        for keep, cells in ((1, True), (2, False), (0, True), (0, False)):
            constants = {"KEEP": keep, "CELLS": cells, **sizes}
            kernel = sequence.forward_sequence
            yield Variant("lstm", kernel, constants, _CELLS, single.options(units), dtypes=("bf16", "fp16"))
        yield Variant("lstm", sequence.backward_sequence, sizes, _CELLS, single.options(units), dtypes=("bf16", "fp16"))


def measure(variant: Variant, dtype: str, capability: int) -> dict[str, Any]:
    """Compile a variant for a device and return what it takes there."""
    signature = variant.signature(dtype)
    aligned = {
        (place,): [["tt.divisibility", _POINTER_BYTES]]
        for place, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(variant.kernel, signature, variant.constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant.options)
    told = _assemble(compiled.asm["ptx"], capability)
    flags = " ".join(f"{name}={value}" for name, value in variant.constants.items() if name != "BLOCK")
    return {
        "kernel": variant.name,
        "flags": flags,
        "dtype": dtype,
        "capability": capability,
        "warps": variant.options["num_warps"],
        "registers": _number(r"Used (\d+) registers", told),
        "spill_bytes": _number(r"(\d+) bytes spill stores", told) + _number(r"(\d+) bytes spill loads", told),
        "shared_bytes": compiled.metadata.shared,
    }


def _assemble(ptx: str, capability: int) -> str:
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    architecture = f"sm_{capability}{'a' if capability == 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(assembler), "-v", "--gpu-name", architecture, str(path), "-o", str(path.with_suffix(".cubin"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _number(pattern: str, told: str) -> int:
    return max(int(number) for number in re.findall(pattern, told))


def table(capabilities: tuple[int, ...] = CAPABILITIES) -> list[dict[str, Any]]:
    """Return a row for every kernel, type and device."""
    wanted = [
        (variant, dtype, capability)
        for variant, capability in itertools.product(variants(), capabilities)
        for dtype in variant.dtypes
    ]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda one: measure(*one), wanted))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to a file instead")
    arguments = parser.parse_args()
    rows = table()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(*(f"{name}={value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
