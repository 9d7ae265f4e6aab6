"""One Elman RNN layer on a GPU, chunk by chunk: cuBLAS products, and Triton kernels for the rest of a step.

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
from torchecho.rnn.elman import triton_kernels
from torchecho.rnn.elman.native import Direction
from torchecho.rnn.gradients import Gradients, WeightGradients
from torchecho.rnn.sequence import rows_of


@on_its_device
def forward(d: Direction) -> tuple[Tensor]:
    """Write y; return the last h [B, H]."""
    w, chunks, bias = d.weights, d.course.chunks, d.bias
    h = d.h0.clone(memory_format=torch.contiguous_format)
    scratch, recurrent = d.x.new_empty(d.course.most_rows, d.units), torch.empty_like(h)
    for chunk in chunks:
        inputs = scratch[: chunk.num_rows]
        products.project(inputs, rows_of(d.x, chunk), w.input, bias)
        tensors = {"inputs": inputs, "weight": w.hidden, "recurrent": recurrent, "h": h, "y": d.y[chunk.rows]}
        spans = spans_of(d.course, chunk)
        body = functools.partial(forward_loop, spans, d.relu)
        uses, repeats = graphs.access("h y", "y recurrent"), d.course.is_dense(chunk)
        graphs.run(body, ("elman forward", spans, d.relu), tensors, uses, repeats=repeats)
    return (h,)


def forward_loop(spans: Spans, relu: bool, tensors: graphs.Tensors) -> None:  # noqa: FBT001 - bound by partial
    """Take the steps of a chunk, two launches each."""
    inputs, weight, recurrent, h, y = required(tensors, "inputs", "weight", "recurrent", "h", "y")
    H, transposed = h.shape[1], weight.t()
    for span in spans:
        rows = span.num_rows
        own_recurrent = recurrent[:rows]
        torch.mm(h[:rows], transposed, out=own_recurrent)
        triton_kernels.forward_step[(triton.cdiv(rows * H, BLOCK),)](
            inputs[span.rows],
            own_recurrent,
            h,
            y[span.rows],
            rows * H,
            H,
            y.stride(0),
            RELU=relu,
            BLOCK=BLOCK,
        )


@on_its_device
def backward(d: Direction, g: Gradients) -> WeightGradients:
    """Return the gradients of the weights, and write those of x and h0 to `g`."""
    w, chunks = d.weights, d.course.chunks
    h0, total = d.h0.contiguous(), products.zero_gradients(w)
    space = d.x.new_empty(d.course.most_rows, d.units)
    for chunk in reversed(chunks):
        dinputs = space[: chunk.num_rows]
        tensors = {"weight": w.hidden, "y": d.y[chunk.rows], "dy": rows_of(g.dy, chunk), "dh": g.dh, "dinputs": dinputs}
        spans = spans_of(d.course, chunk)
        body = functools.partial(backward_loop, spans, d.relu)
        uses, repeats = graphs.access("dh dinputs", "dinputs"), d.course.is_dense(chunk)
        graphs.run(body, ("elman backward", spans, d.relu), tensors, uses, repeats=repeats)
        if g.dx is not None:
            products.write_or_add(g.dx[chunk.rows], dinputs, w.input, add=g.add_to_dx)
        h_before = d.course.rows_before(d.y, h0, chunk)
        products.add_product(total.input, dinputs.t(), rows_of(d.x, chunk))
        products.add_product(total.hidden, dinputs.t(), h_before)
        products.add_columns(total.input_bias, dinputs)
    if total.hidden_bias is not None and total.input_bias is not None:
        total.hidden_bias.copy_(total.input_bias)
    return products.in_type_of(w, total)


def backward_loop(spans: Spans, relu: bool, tensors: graphs.Tensors) -> None:  # noqa: FBT001 - bound by partial
    """Take the steps of a chunk back, two launches each.

    `dh` holds the gradients of all sequences; a step reads and writes those that are so long.
    """
    weight, y, dy, dh, dinputs = required(tensors, "weight", "y", "dy", "dh", "dinputs")
    H = dh.shape[1]
    for span in reversed(spans):
        rows = span.num_rows
        own = dinputs[span.rows]
        triton_kernels.backward_step[(triton.cdiv(rows * H, BLOCK),)](
            y[span.rows],
            dy[span.rows],
            dh,
            own,
            rows * H,
            H,
            y.stride(0),
            dy.stride(0),
            RELU=relu,
            BLOCK=BLOCK,
        )
        torch.mm(own, weight, out=dh[:rows])
