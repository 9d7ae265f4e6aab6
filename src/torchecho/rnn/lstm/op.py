"""One LSTM layer as a PyTorch operator, with the stash mode as an argument."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchecho.rnn.dispatch import NO_STASH, cpp_takes, kernels_for, needs_backward, reference_gradients, runs_natively
from torchecho.rnn.flops import packet, register
from torchecho.rnn.gradients import LayerGradients, room
from torchecho.rnn.lstm import naive, native
from torchecho.rnn.lstm.stash import MODES
from torchecho.rnn.registration import define, differentiate
from torchecho.rnn.sequence import courses_of, default_chunk_steps
from torchecho.rnn.weights import weights_of

_INPUTS = "Tensor x, Tensor? batch_sizes, Tensor h0, Tensor c0, Tensor[] weights, str stash, SymInt chunk_steps"
_FORWARD = f"({_INPUTS}) -> (Tensor y, Tensor h, Tensor c, Tensor gates, Tensor cells)"
_BACKWARD = (
    f"({_INPUTS}, Tensor y, Tensor gates, Tensor cells, Tensor? dy, Tensor? dh, Tensor? dc,"
    " bool needs_dx, bool needs_dh0)"
    " -> (Tensor dx, Tensor dh0, Tensor dc0, Tensor[] dweights)"
)


def lstm(
    x: Tensor, batch_sizes: Tensor | None, h0: Tensor, c0: Tensor, weights: list[Tensor], stash: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer of one or two directions.

    Args:
        x: Padded input [T, B, I], or packed input [rows, I].
        batch_sizes: Rows of each step [T] of packed input, on the CPU.
        h0: First h, [D, B, P].
        c0: First c, [D, B, H].
        weights: Of each direction in torch.nn's order: input, hidden, then both biases and the projection if any.
        stash: One of `stash.MODES`; or ``"auto"``: ``"lean"``, unless a plan chooses another.

    Returns:
        The output, [T, B, D * P] or [rows, D * P], and the last h and c of each sequence.
    """
    if not needs_backward((x, h0, c0, *weights)):
        stash = NO_STASH
    _, B, H = c0.shape
    chunk_steps = default_chunk_steps(B, H, x.device.type)
    y, h, c, _, _ = _forward(x, batch_sizes, h0, c0, weights, stash, chunk_steps)
    return y, h, c


@dataclass(frozen=True)
class _Layer:
    """The inputs of the operator."""

    x: Tensor
    batch_sizes: Tensor | None
    h0: Tensor
    c0: Tensor
    weights: list[Tensor]
    stash: str
    chunk_steps: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return what may need a gradient."""
        return (self.x, self.h0, self.c0, *self.weights)

    @property
    def mode(self) -> str:
        """Return what is stashed: the least where no plan has chosen.

        Gates before activation, rounded to bfloat16, would not have the bits of other modes: the activations are kept.
        """
        if self.stash == "preact" and self.x.dtype == torch.bfloat16 and cpp_takes(self.tensors):
            return "gates"
        return MODES[-1] if self.stash == "auto" else self.stash

    @functools.cached_property
    def by_kernels(self) -> bool:
        """Return whether the kernels run it."""
        return runs_natively(self.tensors)

    @property
    def cell_dtype(self) -> torch.dtype:
        """Return the type in which c is carried and stashed: kernels have at least float32."""
        return torch.float32 if self.by_kernels else self.x.dtype

    @functools.cached_property
    def kernels(self) -> Any:
        """Return the module of the kernels that run it."""
        return kernels_for("lstm", self.tensors)

    def outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return y, h, c and the stash, not written yet."""
        x, (D, B, H), rows = self.x, self.c0.shape, self.x.shape[:-1].numel()
        num_steps = x.shape[0] if self.batch_sizes is None else self.batch_sizes.shape[0]
        stash = self.mode if self.by_kernels else NO_STASH
        every, chunks = (D, rows, H), (D, -(-num_steps // self.chunk_steps), B, H)
        cells = {"gates": every, "preact": chunks, "cell": every, "lean": chunks}.get(stash, (0,))
        gates = (D, rows, 4 * H) if stash in ("gates", "preact") else (0,)
        y = x.new_empty((*x.shape[:-1], D * self.h0.shape[2]))
        h, c = x.new_empty(self.h0.shape), x.new_empty((D, B, H))
        return y, h, c, x.new_empty(gates), x.new_empty(cells, dtype=self.cell_dtype)

    def directions(self, y: Tensor, gates: Tensor, cells: Tensor) -> Iterator[native.Direction]:
        """Return each direction with its share of the output and of the stash."""
        D, _, P = self.h0.shape
        rows, courses = y.flatten(0, -2), courses_of(self.x, self.batch_sizes, D, self.chunk_steps)
        for d, (course, weights) in enumerate(zip(courses, weights_of(self.weights, D), strict=True)):
            yield native.Direction(
                course=course,
                stash=self.mode,
                x=self.x,
                h0=self.h0[d],
                c0=self.c0[d],
                weights=weights,
                y=rows[:, d * P : (d + 1) * P],
                gates=gates[d] if gates.dim() > 1 else gates,
                cells=cells[d] if cells.dim() > 1 else cells,
            )


def _run(*inputs: Any) -> tuple[Tensor, ...]:
    layer = _Layer(*inputs)
    if not layer.by_kernels:
        reference = _reference(layer, *layer.tensors)
        return *(t.clone() for t in reference), layer.x.new_empty(0), layer.x.new_empty(0)
    y, h, c, gates, cells = layer.outputs()
    for d, direction in enumerate(layer.directions(y, gates, cells)):
        last_h, last_c = layer.kernels.forward(direction)
        h[d].copy_(last_h)
        c[d].copy_(last_c)
    return y, h, c, gates, cells


def _fake(*inputs: Any) -> tuple[Tensor, ...]:
    return _Layer(*inputs).outputs()


def _run_backward(*inputs: Any) -> tuple[Any, ...]:
    layer, (y, gates, cells, dy, dh, dc, needs_dx, needs_dh0) = _Layer(*inputs[:7]), inputs[7:]
    states = [layer.h0, layer.c0]
    gradients = LayerGradients.of(layer.x, y, states, [dy, dh, dc], needs_dx=needs_dx, needs_dh0=needs_dh0)
    dweights = []
    for d, direction in enumerate(layer.directions(y, gates, cells)):
        dweights += layer.kernels.backward(direction, gradients.of_cell_direction(d)).tensors()
    return *gradients.of_inputs(), dweights


def _fake_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    layer, (needs_dx, needs_dh0) = _Layer(*inputs[:7]), inputs[-2:]
    dx, dh0 = room(layer.x, needed=needs_dx), room(layer.h0, needed=needs_dh0)
    return dx, dh0, room(layer.c0, needed=True), [room(w, needed=True) for w in layer.weights]


def _reference(layer: _Layer, x: Tensor, h0: Tensor, c0: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return naive.layer(x, layer.batch_sizes, h0, c0, weights_of(weights, h0.shape[0]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, batch_sizes, h0, c0, weights, ctx.stash, ctx.chunk_steps = inputs
    y, _, _, gates, cells = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(gates, cells)
    ctx.save_for_backward(x, batch_sizes, h0, c0, y, gates, cells, *weights)


def _differentiate(ctx: Any, dy: Any, dh: Any, dc: Any, *_: Any) -> tuple[Any, ...]:
    x, batch_sizes, h0, c0, y, gates, cells, *weights = ctx.saved_tensors
    layer = _Layer(x, batch_sizes, h0, c0, weights, ctx.stash, ctx.chunk_steps)
    needs_dx, needs_dh0 = ctx.needs_input_grad[1:3]
    if torch.is_grad_enabled() or not layer.by_kernels:
        found = reference_gradients(lambda *inputs: _reference(layer, *inputs), layer.tensors, (dy, dh, dc))
        dx, dh0, dc0, *dweights = found
    else:
        inputs = (x, batch_sizes, h0, c0, weights, ctx.stash, ctx.chunk_steps)
        dx, dh0, dc0, dweights = _backward(*inputs, y, gates, cells, dy, dh, dc, needs_dx, needs_dh0)
    return dx if needs_dx else None, dh0 if needs_dh0 else None, dc0, *dweights


_forward = define("lstm", _FORWARD, _run, _fake)
_backward = define("lstm_backward", _BACKWARD, _run_backward, _fake_backward)
differentiate(_forward, lambda *inputs: _Layer(*inputs).tensors, _save, _differentiate)
register(packet("lstm"), packet("lstm_backward"), weights_at=4, stash_at=5)
