"""One LSTM layer as a PyTorch operator, with the stash mode as an argument."""

from typing import Any

import torch
from torch import Tensor

from torchecho.rnn.dispatch import NO_STASH, needs_backward, reference_gradients, runs_natively
from torchecho.rnn.lstm import naive, native
from torchecho.rnn.sequence import default_chunk_steps, layout_of
from torchecho.rnn.weights import weights_of

_FORWARD = (
    "(Tensor x, Tensor? batch_sizes, Tensor h0, Tensor c0, Tensor[] weights, str stash, SymInt chunk_steps)"
    " -> (Tensor y, Tensor h, Tensor c, Tensor gates, Tensor cells)"
)
_BACKWARD = (
    "(Tensor? dy, Tensor? dh, Tensor? dc, Tensor x, Tensor? batch_sizes, Tensor h0, Tensor c0, Tensor[] weights,"
    " Tensor y, Tensor gates, Tensor cells, str stash, SymInt chunk_steps, bool needs_dx) -> Tensor[]"
)


def lstm(  # noqa: PLR0913 - what a layer has
    x: Tensor, batch_sizes: Tensor | None, h0: Tensor, c0: Tensor, weights: list[Tensor], stash: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer of one or two directions.

    Args:
        x: Padded input [T, B, I], or packed input [rows, I].
        batch_sizes: Rows of each step [T] of packed input, on the CPU.
        h0: First h, [D, B, P].
        c0: First c, [D, B, H].
        weights: Of each direction in torch.nn's order: input, hidden, then both biases and the projection if any.
        stash: One of `stash.MODES`.

    Returns:
        The output, [T, B, D * P] or [rows, D * P], and the last h and c of each sequence.
    """
    if not needs_backward((x, h0, c0, *weights)):
        stash = NO_STASH
    y, h, c, _, _ = _layer(x, batch_sizes, h0, c0, weights, stash, default_chunk_steps(h0.shape[1]))
    return y, h, c


@torch.library.custom_op("torchecho::lstm", mutates_args=(), schema=_FORWARD)
def _layer(x, batch_sizes, h0, c0, weights, stash, chunk_steps):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0913 - as the schema says
    if not runs_natively((x, h0, c0, *weights)):
        y, h, c = naive.layer(x, batch_sizes, h0, c0, weights_of(weights, h0.shape[0]))
        return y, h.clone(), c.clone(), x.new_empty(0), x.new_empty(0)
    layout = layout_of(x, batch_sizes)
    y, h, c, gates, cells = _outputs(x, h0, c0, stash, chunk_steps, layout.num_steps)
    for d in _directions(x, layout, h0, c0, weights, y, gates, cells, stash, chunk_steps):
        place = int(d.reverse)
        h_last, c_last = native.forward(d)
        h[place].copy_(h_last)
        c[place].copy_(c_last)
    return y, h, c, gates, cells


@_layer.register_fake
def _(x, batch_sizes, h0, c0, weights, stash, chunk_steps):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0913 - as above
    num_steps = x.shape[0] if batch_sizes is None else batch_sizes.shape[0]
    if not runs_natively((x, h0, c0, *weights)):
        stash = NO_STASH
    return _outputs(x, h0, c0, stash, chunk_steps, num_steps)


def _outputs(x, h0, c0, stash, chunk_steps, num_steps):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0913 - sizes
    directions, batch, units = c0.shape
    rows = x.shape[:-1].numel()
    chunks = -(-num_steps // chunk_steps)
    gates = (directions, rows, 4 * units) if stash in ("gates", "preact") else (0,)
    cells = {
        "gates": (directions, rows, units),
        "preact": (directions, chunks, batch, units),
        "cell": (directions, rows, units),
        "lean": (directions, chunks, batch, units),
    }.get(stash, (0,))
    y = x.new_empty(*x.shape[:-1], directions * h0.shape[2])
    return y, x.new_empty(h0.shape), x.new_empty(c0.shape), x.new_empty(gates), x.new_empty(cells)


def _directions(x, layout, h0, c0, weights, y, gates, cells, stash, chunk_steps):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0913 - all of a layer
    size = h0.shape[2]
    rows = y.view(-1, y.shape[-1])
    for place, own in enumerate(weights_of(weights, h0.shape[0])):
        yield native.Direction(
            layout=layout,
            reverse=place == 1,
            chunk_steps=chunk_steps,
            stash=stash,
            x=x,
            h0=h0[place],
            c0=c0[place],
            weights=own,
            y=rows[:, place * size : (place + 1) * size],
            gates=gates[place] if gates.dim() > 1 else gates,
            cells=cells[place] if cells.dim() > 1 else cells,
        )


@torch.library.custom_op("torchecho::lstm_backward", mutates_args=(), schema=_BACKWARD)
def _layer_backward(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913 - as the schema says
    dy, dh, dc, x, batch_sizes, h0, c0, weights, y, gates, cells, stash, chunk_steps, needs_dx  # noqa: ANN001 - as above
):
    layout = layout_of(x, batch_sizes)
    size = h0.shape[2]
    dy = y.new_zeros(y.shape) if dy is None else dy
    dx = x.new_empty(layout.num_rows, x.shape[-1]) if needs_dx else None
    dh0 = h0.new_empty(h0.shape)
    dc0 = c0.new_zeros(c0.shape) if dc is None else dc.clone(memory_format=torch.contiguous_format)
    dh = h0.new_zeros(h0.shape) if dh is None else dh
    dweights = []
    for d in _directions(x, layout, h0, c0, weights, y, gates, cells, stash, chunk_steps):
        place = int(d.reverse)
        own = dy[..., place * size : (place + 1) * size]
        dh_first, total = native.backward(d, native.Gradients(own, dh[place], dc0[place], dx, place > 0))
        dh0[place].copy_(dh_first)
        dweights += total.tensors()
    return [x.new_empty(0) if dx is None else dx.view(x.shape), dh0, dc0, *dweights]


@_layer_backward.register_fake
def _(dy, dh, dc, x, batch_sizes, h0, c0, weights, y, gates, cells, stash, chunk_steps, needs_dx):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001, PLR0913 - as above
    dx = x.new_empty(x.shape if needs_dx else (0,))
    return [dx, h0.new_empty(h0.shape), c0.new_empty(c0.shape), *(w.new_empty(w.shape) for w in weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, batch_sizes, h0, c0, weights, stash, chunk_steps = inputs
    y, _, _, gates, cells = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(gates, cells)
    ctx.save_for_backward(x, batch_sizes, h0, c0, y, gates, cells, *weights)
    ctx.stash, ctx.chunk_steps = stash, chunk_steps


def _differentiate(ctx: Any, dy: Any, dh: Any, dc: Any, *_: Any) -> tuple[Any, ...]:
    x, batch_sizes, h0, c0, y, gates, cells, *weights = ctx.saved_tensors
    needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[2:4]]
    if torch.is_grad_enabled() or not runs_natively((x, h0, c0, *weights)):

        def forward(x: Tensor, h0: Tensor, c0: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            return naive.layer(x, batch_sizes, h0, c0, weights_of(weights, h0.shape[0]))

        inputs = (x, h0, c0, *weights)
        needed = [t.requires_grad for t in inputs]
        dx, dh0, dc0, *dweights = reference_gradients(forward, inputs, needed, (dy, dh, dc))
    else:
        dx, dh0, dc0, *dweights = _layer_backward(
            dy, dh, dc, x, batch_sizes, h0, c0, weights, y, gates, cells, ctx.stash, ctx.chunk_steps, needs[0]
        )
    return dx if needs[0] else None, None, dh0, dc0, dweights, None, None


_layer.register_autograd(_differentiate, setup_context=_save)
