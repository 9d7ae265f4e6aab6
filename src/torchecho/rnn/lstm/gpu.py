"""One LSTM layer on a GPU, chunk by chunk: cuBLAS products, and Triton kernels for the rest of a step.

The cell is float32 whatever the type of the layer, and so is its stash; h is rounded to the layer's type each step.
"""

import functools

import torch
import triton
from torch import Tensor

from torchecho.rnn.cuda import graphs, products
from torchecho.rnn.cuda.device import on_its_device
from torchecho.rnn.cuda.graphs import required
from torchecho.rnn.cuda.spans import BLOCK, Spans, first_rows, spans_of
from torchecho.rnn.gradients import CellGradients, WeightGradients
from torchecho.rnn.lstm import single, triton_kernels
from torchecho.rnn.lstm.native import Direction
from torchecho.rnn.sequence import Chunk, rows_of

_KEEP = {"gates": 1, "preact": 2}


@on_its_device
def forward(d: Direction) -> tuple[Tensor, Tensor]:
    """Write y and the stash; return the last h [B, P] and c [B, H]."""
    H, B, w = d.units, d.course.batch, d.weights
    chunks, bias = d.course.chunks, d.bias
    cell = d.c0.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    h = d.h0.clone(memory_format=torch.contiguous_format)
    scratch = None if d.stash in _KEEP else d.x.new_empty(d.course.most_rows, 4 * H)
    recurrent = d.x.new_empty(B, 4 * H)
    unprojected = None if w.projection is None else d.x.new_empty(B, H)
    for chunk in chunks:
        gates = d.gates[chunk.rows] if scratch is None else scratch[: chunk.num_rows]
        products.project(gates, rows_of(d.x, chunk), w.input, bias)
        if d.stash in ("preact", "lean"):
            d.cells[chunk.index].copy_(cell)
        tensors = {
            "gates": gates,
            "weight": w.hidden,
            "projection": w.projection,
            "recurrent": recurrent,
            "unprojected": unprojected,
            "h": h,
            "cell": cell,
            "y": d.y[chunk.rows],
            "cells": d.cells[chunk.rows] if d.stash in ("gates", "cell") else None,
        }
        spans = spans_of(d.course, chunk)
        keep = _KEEP.get(d.stash, 0)
        uses = graphs.access("h cell y cells gates" if keep else "h cell y cells", "y cells recurrent unprojected")
        if single.takes(d):
            single.forward_chunk(spans, keep, tensors)
            continue
        body = functools.partial(forward_loop, spans, keep)
        graphs.run(body, ("lstm forward", spans, keep), tensors, uses, repeats=d.course.is_dense(chunk))
    return h, cell


def forward_loop(spans: Spans, keep: int, tensors: graphs.Tensors) -> None:
    """Take the steps of a chunk, two launches each, three more where h is projected."""
    gates, weight, recurrent = required(tensors, "gates", "weight", "recurrent")
    h, cell, y = required(tensors, "h", "cell", "y")
    cells, projection, unprojected = tensors["cells"], tensors["projection"], tensors["unprojected"]
    H = cell.shape[1]
    transposed = weight.t()
    for span in spans:
        rows = span.num_rows
        own_gates, own_h, own_recurrent = gates[span.rows], h[:rows], recurrent[:rows]
        torch.mm(own_h, transposed, out=own_recurrent)
        triton_kernels.forward_step[(triton.cdiv(rows * H, BLOCK),)](
            own_gates,
            own_recurrent,
            cell,
            h if unprojected is None else unprojected,
            y[span.rows],
            own_gates,
            cell if cells is None else cells[span.rows],
            rows * H,
            H,
            y.stride(0),
            KEEP=keep,
            CELLS=cells is not None,
            PROJECTED=projection is not None,
            BLOCK=BLOCK,
        )
        if projection is not None and unprojected is not None:
            torch.mm(unprojected[:rows], projection.t(), out=own_h)
            y[span.rows].copy_(own_h)


@on_its_device
def backward(d: Direction, g: CellGradients) -> WeightGradients:
    """Return the gradients of the weights, and write those of x, h0 and c0 to `g`."""
    H, P, B, w = d.units, d.y.shape[1], d.course.batch, d.weights
    chunks = d.course.chunks
    most = d.course.most_rows
    scratch = d.x.new_empty(most, 4 * H)
    projected = w.projection is not None
    space = {
        "d_output": d.x.new_empty(most, P) if projected else None,
        "d_unprojected": d.x.new_empty(B, H) if projected else None,
        "unprojected": d.x.new_empty(most, H) if projected else None,
    }
    total = products.zero_gradients(w)
    h0, c0 = d.h0.contiguous(), d.c0.to(torch.float32).contiguous()
    dc = g.dc.to(torch.float32, copy=True)
    for chunk in reversed(chunks):
        spans = spans_of(d.course, chunk)
        h_before = d.course.rows_before(d.y, h0, chunk)
        gates, cells, before = _restore(d, chunk, spans, h_before, c0, scratch)
        dgates = scratch[: chunk.num_rows]
        own = {name: tensor[: chunk.num_rows] if tensor is not None else None for name, tensor in space.items()}
        tensors = {
            "gates": gates,
            "cells": cells,
            "before": before,
            "c0": c0,
            "weight": w.hidden,
            "projection": w.projection,
            "dy": rows_of(g.dy, chunk),
            "dh": g.dh,
            "dc": dc,
            "dgates": None if gates is dgates else dgates,
            **own,
            "d_unprojected": space["d_unprojected"],
        }
        results = "d_output unprojected dgates"
        uses = graphs.access(f"dh dc {results}{' gates' if gates is dgates else ''}", f"d_unprojected {results}")
        if single.takes(d):
            single.backward_chunk(spans, tensors)
        else:
            body = functools.partial(backward_loop, spans)
            graphs.run(body, ("lstm backward", spans), tensors, uses, repeats=d.course.is_dense(chunk))
        if g.dx is not None:
            products.write_or_add(g.dx[chunk.rows], dgates, w.input, add=g.add_to_dx)
        products.add_product(total.input, dgates.t(), rows_of(d.x, chunk))
        products.add_product(total.hidden, dgates.t(), h_before)
        products.add_columns(total.input_bias, dgates)
        if total.projection is not None:
            d_output, unprojected = required(own, "d_output", "unprojected")
            products.add_product(total.projection, d_output.t(), unprojected)
    if total.hidden_bias is not None and total.input_bias is not None:
        total.hidden_bias.copy_(total.input_bias)
    g.dc.copy_(dc)
    return products.in_type_of(w, total)


def backward_loop(spans: Spans, tensors: graphs.Tensors) -> None:
    """Take the steps of a chunk back, two launches each, two more where h is projected.

    `dh` and `dc` hold the gradients of all sequences; a step reads and writes those that are so long.
    """
    gates, cells, before, c0 = required(tensors, "gates", "cells", "before", "c0")
    weight, dy, dh, dc = required(tensors, "weight", "dy", "dh", "dc")
    dgates = gates if tensors["dgates"] is None else tensors["dgates"]
    projection, H = tensors["projection"], dc.shape[1]
    for place in reversed(range(len(spans))):
        span, rows = spans[place], spans[place].num_rows
        own_dh, own_dgates = dh[:rows], dgates[span.rows]
        d_unprojected, unprojected = own_dh, own_dh
        if projection is not None:
            d_output, every, all_unprojected = required(tensors, "d_output", "d_unprojected", "unprojected")
            d_unprojected, unprojected = every[:rows], all_unprojected[span.rows]
            torch.add(own_dh, dy[span.rows], out=d_output[span.rows])
            torch.mm(d_output[span.rows], projection, out=d_unprojected)
        triton_kernels.backward_step[(triton.cdiv(rows * H, BLOCK),)](
            gates[span.rows],
            cells[span.rows],
            cells[spans[place - 1].rows] if place else before,
            c0,
            dy[span.rows],
            d_unprojected,
            dc,
            own_dgates,
            unprojected,
            rows * H,
            span.continuing * H,
            H,
            dy.stride(0),
            PROJECTED=projection is not None,
            BLOCK=BLOCK,
        )
        torch.mm(own_dgates, weight, out=own_dh)


def _restore(
    d: Direction, chunk: Chunk, spans: Spans, h_before: Tensor, c0: Tensor, scratch: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activated gates, the cells, and the cells before the chunk, from whatever was stashed.

    The cells before are those of all sequences, or those of the step before where it had fewer.
    """
    H, many = d.units, chunk.num_rows
    if d.stash == "gates":
        return d.gates[chunk.rows], d.cells[chunk.rows], d.course.state_before(d.cells, c0, chunk)
    gates, recurrent, w = scratch[:many], None, d.weights
    if d.stash == "preact":
        gates.copy_(d.gates[chunk.rows])
    else:
        products.project(gates, rows_of(d.x, chunk), w.input, d.bias)
        recurrent = torch.mm(h_before, w.hidden.t())
    whole = d.stash == "cell"
    cells = d.cells[chunk.rows] if whole else d.cells.new_empty(many, H)
    before = d.course.state_before(d.cells, c0, chunk) if whole else d.cells[chunk.index]
    triton_kernels.rebuild[(triton.cdiv(c0.numel(), BLOCK),)](
        gates,
        gates if recurrent is None else recurrent,
        before,
        cells,
        first_rows(spans, gates.device),
        len(spans),
        before.numel(),
        H,
        SUM=recurrent is not None,
        CELLS=not whole,
        BLOCK=BLOCK,
    )
    return gates, cells, before
