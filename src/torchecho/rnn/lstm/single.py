"""All steps of a chunk of an LSTM in one launch: which layers can be run so, and the launches."""

import torch
import triton

from torchecho.rnn.cuda.graphs import Tensors, required
from torchecho.rnn.cuda.spans import Spans, first_rows
from torchecho.rnn.lstm import triton_sequence
from torchecho.rnn.lstm.native import Direction

#: Sequences of one program: the fewest rows that a tensor core multiplies.
ROWS = 16
#: The most units whose recurrent weights fit into the shared memory of an A100 or H100 (8 H^2 bytes).
MOST_UNITS = 128
_OTHER_SHARED_BYTES = 2**14  # operands of products, and what passes between threads


def takes(d: Direction) -> bool:
    """Return whether a layer runs so: of a half type, without projection, its recurrent weights in shared memory.

    Float32 does not: exact products of float32 have no tensor cores, and spilled registers when tried.
    """
    halves = d.x.dtype in (torch.bfloat16, torch.float16)
    return halves and d.weights.projection is None and d.units <= MOST_UNITS and _device_can(d)


def forward_chunk(spans: Spans, keep: int, tensors: Tensors) -> None:
    """Do what `gpu.forward_loop` does."""
    gates, weight, h, cell, y = required(tensors, "gates", "weight", "h", "cell", "y")
    cells, (B, H) = tensors["cells"], cell.shape
    triton_sequence.forward_sequence[(triton.cdiv(B, ROWS),)](
        gates,
        weight.contiguous(),
        h,
        cell,
        y,
        cell if cells is None else cells,
        first_rows(spans, gates.device),
        len(spans),
        B,
        y.stride(0),
        H=H,
        KEEP=keep,
        CELLS=cells is not None,
        ROWS=ROWS,
        UNITS=padded(H),
        **options(H),
    )


def backward_chunk(spans: Spans, tensors: Tensors) -> None:
    """Do what `gpu.backward_loop` does, but the gradient of h is float32 from step to step."""
    gates, cells, before, c0 = required(tensors, "gates", "cells", "before", "c0")
    weight, dy, dh, dc = required(tensors, "weight", "dy", "dh", "dc")
    dgates, (B, H) = tensors["dgates"], dc.shape
    triton_sequence.backward_sequence[(triton.cdiv(B, ROWS),)](
        gates,
        cells,
        before,
        c0,
        weight.contiguous(),
        dy,
        dh,
        dc,
        gates if dgates is None else dgates,
        first_rows(spans, gates.device),
        len(spans),
        B,
        dy.stride(0),
        H=H,
        ROWS=ROWS,
        UNITS=padded(H),
        **options(H),
    )


def padded(units: int) -> int:
    """Return the units of a program: a power of 2, and no fewer than a tensor core multiplies."""
    return max(16, int(triton.next_power_of_2(units)))


def options(units: int) -> dict[str, int]:
    """Return how a kernel is compiled; loads are not staged in shared memory, which the weights need."""
    return {"num_warps": 4 if padded(units) <= 32 else 8, "num_stages": 1}


def _device_can(d: Direction) -> bool:
    if not d.x.is_cuda:
        # Triton 3.6's interpreter multiplies bfloat16 matrices as if their bits were integers.
        return d.x.dtype != torch.bfloat16
    properties = torch.cuda.get_device_properties(d.x.device)
    available = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    needed = 4 * padded(d.units) ** 2 * d.x.element_size() + _OTHER_SHARED_BYTES
    return bool(needed <= available)
