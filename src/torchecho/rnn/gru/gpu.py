"""One GRU layer on a GPU, chunk by chunk: cuBLAS products, and Triton kernels for the rest of a step.

h is rounded to the layer's type each step, and so are the gradients that a step hands on.
"""

import functools

import torch
import triton
from torch import Tensor

from torchecho.rnn.cuda import graphs, products
from torchecho.rnn.cuda.device import on_its_device
from torchecho.rnn.cuda.graphs import required
from torchecho.rnn.cuda.spans import BLOCK, Spans, spans_of
from torchecho.rnn.gradients import Gradients, WeightGradients
from torchecho.rnn.gru import triton_kernels
from torchecho.rnn.gru.native import Direction
from torchecho.rnn.sequence import rows_of


@on_its_device
def forward(d: Direction) -> tuple[Tensor]:
    """Write y and the stash; return the last h [B, H]."""
    H, B, w, chunks = d.units, d.course.batch, d.weights, d.course.chunks
    h = d.h0.clone(memory_format=torch.contiguous_format)
    scratch = d.x.new_empty(d.course.most_rows, 3 * H)
    recurrent, bias = d.x.new_empty(B, 3 * H), d.bias
    for chunk in chunks:
        inputs = scratch[: chunk.num_rows]
        products.project(inputs, rows_of(d.x, chunk), w.input, bias)
        tensors = {
            "inputs": inputs,
            "weight": w.hidden,
            "bias_n": d.bias_n,
            "recurrent": recurrent,
            "h": h,
            "y": d.y[chunk.rows],
            "gates": None if d.gates is None else d.gates[chunk.rows],
        }
        spans = spans_of(d.course, chunk)
        body = functools.partial(forward_loop, spans)
        uses = graphs.access("h y gates", "y gates recurrent")
        graphs.run(body, ("gru forward", spans), tensors, uses, repeats=d.course.is_dense(chunk))
    return (h,)


def forward_loop(spans: Spans, tensors: graphs.Tensors) -> None:
    """Take the steps of a chunk, two launches each."""
    inputs, weight, recurrent, h, y = required(tensors, "inputs", "weight", "recurrent", "h", "y")
    gates, bias_n, H = tensors["gates"], tensors["bias_n"], h.shape[1]
    transposed = weight.t()
    for span in spans:
        rows = span.num_rows
        own_recurrent = recurrent[:rows]
        torch.mm(h[:rows], transposed, out=own_recurrent)
        triton_kernels.forward_step[(triton.cdiv(rows * H, BLOCK),)](
            inputs[span.rows],
            own_recurrent,
            h if bias_n is None else bias_n,
            h,
            y[span.rows],
            inputs if gates is None else gates[span.rows],
            rows * H,
            H,
            y.stride(0),
            BIAS=bias_n is not None,
            KEEP=gates is not None,
            BLOCK=BLOCK,
        )


@on_its_device
def backward(d: Direction, g: Gradients) -> WeightGradients:
    """Return the gradients of the weights, and write those of x and h0 to `g`."""
    H, w, chunks = d.units, d.weights, d.course.chunks
    h0, total = d.h0.contiguous(), products.zero_gradients(w)
    most = d.course.most_rows
    space, bias = d.x.new_empty(most, 4 * H), d.bias
    inputs = None if d.gates is not None else d.x.new_empty(most, 3 * H)
    d_bias = None if w.input_bias is None else d.x.new_zeros(4 * H, dtype=torch.float32)
    for chunk in reversed(chunks):
        many, x = chunk.num_rows, rows_of(d.x, chunk)
        dgates, h_before = space[:many], d.course.rows_before(d.y, h0, chunk)
        recurrent = None
        if inputs is not None:
            products.project(inputs[:many], x, w.input, bias)
            recurrent = torch.mm(h_before, w.hidden.t())
        tensors = {
            "gates": None if d.gates is None else d.gates[chunk.rows],
            "inputs": None if inputs is None else inputs[:many],
            "recurrent": recurrent,
            "weight": w.hidden,
            "bias_n": d.bias_n,
            "before": h_before.contiguous(),
            "dy": rows_of(g.dy, chunk),
            "dh": g.dh,
            "dgates": dgates,
        }
        spans = spans_of(d.course, chunk)
        body = functools.partial(backward_loop, spans)
        uses = graphs.access("dh dgates", "dgates")
        graphs.run(body, ("gru backward", spans), tensors, uses, repeats=d.course.is_dense(chunk))
        n, rz = dgates[:, :H], dgates[:, H : 3 * H]
        if g.dx is not None:
            products.write_or_add(g.dx[chunk.rows], rz, w.input[: 2 * H], add=g.add_to_dx)
            g.dx[chunk.rows].addmm_(n, w.input[2 * H :])
        products.add_product(total.input[: 2 * H], rz.t(), x)
        products.add_product(total.input[2 * H :], n.t(), x)
        products.add_product(total.hidden, dgates[:, H:].t(), h_before)
        products.add_columns(d_bias, dgates)
    if d_bias is not None and total.input_bias is not None and total.hidden_bias is not None:
        torch.cat((d_bias[H : 3 * H], d_bias[:H]), out=total.input_bias)
        total.hidden_bias.copy_(d_bias[H:])
    return products.in_type_of(w, total)


def backward_loop(spans: Spans, tensors: graphs.Tensors) -> None:
    """Take the steps of a chunk back, two launches each.

    `dh` holds the gradients of all sequences; a step reads and writes those that are so long.
    """
    weight, before, dy, dh, dgates = required(tensors, "weight", "before", "dy", "dh", "dgates")
    gates, inputs, recurrent, bias_n = (tensors[name] for name in ("gates", "inputs", "recurrent", "bias_n"))
    H = dh.shape[1]
    for span in reversed(spans):
        rows = span.num_rows
        own_dh, own_dgates = dh[:rows], dgates[span.rows]
        triton_kernels.backward_step[(triton.cdiv(rows * H, BLOCK),)](
            own_dgates if gates is None else gates[span.rows],
            own_dgates if inputs is None else inputs[span.rows],
            own_dgates if recurrent is None else recurrent[span.rows],
            own_dgates if bias_n is None else bias_n,
            before[span.rows],
            dy[span.rows],
            dh,
            own_dgates,
            rows * H,
            H,
            dy.stride(0),
            BIAS=bias_n is not None,
            KEPT=gates is not None,
            BLOCK=BLOCK,
        )
        own_dh.addmm_(own_dgates[:, H:], weight)
