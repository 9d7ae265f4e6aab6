"""One layer of an LSTM variant as a PyTorch operator, with the variant and the stash mode as arguments."""

import functools
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from torchecho.rnn.dispatch import NO_STASH, cpp_takes, needs_backward, reference_gradients
from torchecho.rnn.flops import packet, register
from torchecho.rnn.gradients import LayerGradients, room
from torchecho.rnn.registration import define, differentiate
from torchecho.rnn.sequence import courses_of, default_chunk_steps
from torchecho.rnn.variant import naive, native
from torchecho.rnn.variant.cell import Variant, noise_of, variant_weights

_INPUTS = (
    "Tensor x, Tensor? batch_sizes, Tensor h0, Tensor c0, Tensor[] weights,"
    " Tensor? drop, Tensor? zone_cell, Tensor? zone_hidden,"
    " bool layer_norm, bool peephole, bool coupled, float zoneout_cell, float zoneout_hidden,"
    " str stash, SymInt chunk_steps"
)
_NUM_INPUTS = 15
_KEPT = "Tensor gates, Tensor input_normal, Tensor normal, Tensor scales, Tensor cells"
_NUM_KEPT = 5
_FORWARD = f"({_INPUTS}) -> (Tensor y, Tensor h, Tensor c, {_KEPT})"
_BACKWARD = (
    f"({_INPUTS}, Tensor y, {_KEPT}, Tensor? dy, Tensor? dh, Tensor? dc, bool needs_dx, bool needs_dh0)"
    " -> (Tensor dx, Tensor dh0, Tensor dc0, Tensor[] dweights)"
)
Drawn = tuple[Tensor | None, Tensor | None, Tensor | None]


def lstm_variant(
    x: Tensor,
    batch_sizes: Tensor | None,
    states: tuple[Tensor, Tensor],
    weights: list[Tensor],
    variant: Variant,
    drawn: Drawn,
    stash: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer of one or two directions.

    Args:
        x: Padded input [T, B, I], or packed input [rows, I].
        batch_sizes: Rows of each step [T] of packed input, on the CPU.
        states: First h [D, B, P] and c [D, B, H].
        weights: Of each direction, those of `cell.VariantWeights` that the variant has.
        variant: Which variant it is.
        drawn: Noise: the dropout of h [D, B, P], and uint8 masks of the elements of c [D, rows, H] and of h
            [D, rows, P] that stay.
        stash: One of `stash.MODES`.

    Returns:
        The output, [T, B, D * P] or [rows, D * P], and the last h and c of each sequence.
    """
    if not needs_backward((x, *states, *weights)):
        stash = NO_STASH
    chunk_steps = default_chunk_steps(*states[1].shape[1:])
    y, h, c, *_ = _forward(x, batch_sizes, *states, weights, *drawn, *astuple(variant), stash, chunk_steps)
    return y, h, c


@dataclass(frozen=True)
class _Layer:
    """The inputs of the operator."""

    x: Tensor
    batch_sizes: Tensor | None
    h0: Tensor
    c0: Tensor
    weights: list[Tensor]
    drop: Tensor | None
    zone_cell: Tensor | None
    zone_hidden: Tensor | None
    variant: Variant
    stash: str
    chunk_steps: int

    @staticmethod
    def of(*inputs: Any) -> "_Layer":
        """Sort the arguments of the operator."""
        sorted_inputs = (*inputs[:8], Variant(*inputs[8:13]), *inputs[13:15])
        return _Layer(*sorted_inputs)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return what may need a gradient."""
        return (self.x, self.h0, self.c0, *self.weights)

    @functools.cached_property
    def by_kernels(self) -> bool:
        """Return whether the kernels run it: those in C++, of float32 alone."""
        return self.x.dtype == torch.float32 and cpp_takes(self.tensors)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return y, h, c and the stash, not written yet."""
        x, (D, _, P), rows = self.x, self.h0.shape, self.x.shape[:-1].numel()
        y = x.new_empty((*x.shape[:-1], D * P))
        return (
            y,
            x.new_empty(self.h0.shape),
            x.new_empty(self.c0.shape),
            *(x.new_empty(shape) for shape in self._kept(rows)),
        )

    def _kept(self, rows: int) -> list[tuple[int, ...]]:
        D, B, H = self.c0.shape
        nothing, width = (D, 0), self.variant.gates * H
        stash = self.stash if self.by_kernels else NO_STASH
        if stash == "gates":
            every = (D, rows, width)
            normal = [every, every, (D, 2, rows)] if self.variant.layer_norm else [nothing] * 3
            return [every, *normal, (D, rows, H)]
        num_steps = self.x.shape[0] if self.batch_sizes is None else self.batch_sizes.shape[0]
        cells = (D, -(-num_steps // self.chunk_steps), B, H) if stash == "lean" else nothing
        return [*[nothing] * (_NUM_KEPT - 1), cells]

    def directions(self, y: Tensor, *kept: Tensor) -> Iterator[native.Direction]:
        """Return each direction with its share of the output and of the stash."""
        D, _, P = self.h0.shape
        rows, courses = y.flatten(0, -2), courses_of(self.x, self.batch_sizes, D, self.chunk_steps)
        sorted_weights = variant_weights(self.weights, self.variant, D)
        for d, (course, weights) in enumerate(zip(courses, sorted_weights, strict=True)):
            yield native.Direction(
                course=course,
                stash=self.stash,
                variant=self.variant,
                noise=noise_of(self.drop, self.zone_cell, self.zone_hidden, d),
                x=self.x,
                h0=self.h0[d],
                c0=self.c0[d],
                weights=weights,
                y=rows[:, d * P : (d + 1) * P],
                kept=native.Kept(*(t[d] for t in kept)),
            )


def _run(*inputs: Any) -> tuple[Tensor, ...]:
    layer = _Layer.of(*inputs)
    y, h, c, *kept = layer.outputs()
    if not layer.by_kernels:
        return *(t.clone() for t in _reference(layer, *layer.tensors)), *kept
    for d, direction in enumerate(layer.directions(y, *kept)):
        last_h, last_c = native.forward(direction)
        h[d].copy_(last_h)
        c[d].copy_(last_c)
    return y, h, c, *kept


def _fake(*inputs: Any) -> tuple[Tensor, ...]:
    return _Layer.of(*inputs).outputs()


def _run_backward(*inputs: Any) -> tuple[Any, ...]:
    layer = _Layer.of(*inputs)
    y, *kept, dy, dh, dc, needs_dx, needs_dh0 = inputs[_NUM_INPUTS:]
    states = [layer.h0, layer.c0]
    gradients = LayerGradients.of(layer.x, y, states, [dy, dh, dc], needs_dx=needs_dx, needs_dh0=needs_dh0)
    dweights = []
    for d, direction in enumerate(layer.directions(y, *kept)):
        dweights += native.backward(direction, gradients.of_cell_direction(d))
    return *gradients.of_inputs(), dweights


def _fake_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    layer, (needs_dx, needs_dh0) = _Layer.of(*inputs), inputs[-2:]
    dx, dh0 = room(layer.x, needed=needs_dx), room(layer.h0, needed=needs_dh0)
    return dx, dh0, room(layer.c0, needed=True), [room(w, needed=True) for w in layer.weights]


def _reference(layer: _Layer, x: Tensor, h0: Tensor, c0: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    D = h0.shape[0]
    noise = [noise_of(layer.drop, layer.zone_cell, layer.zone_hidden, d) for d in range(D)]
    sorted_weights = variant_weights(weights, layer.variant, D)
    return naive.layer(x, layer.batch_sizes, h0, c0, sorted_weights, layer.variant, noise)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, batch_sizes, h0, c0, weights, *drawn = inputs[:8]
    y, _, _, *kept = output
    ctx.options = inputs[8:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(x, batch_sizes, h0, c0, *drawn, y, *kept, *weights)


def _differentiate(ctx: Any, dy: Any, dh: Any, dc: Any, *_: Any) -> tuple[Any, ...]:
    x, batch_sizes, h0, c0, drop, zone_cell, zone_hidden, y, *rest = ctx.saved_tensors
    kept, weights = rest[:_NUM_KEPT], rest[_NUM_KEPT:]
    inputs = (x, batch_sizes, h0, c0, weights, drop, zone_cell, zone_hidden, *ctx.options)
    layer = _Layer.of(*inputs)
    needs_dx, needs_dh0 = ctx.needs_input_grad[1:3]
    if torch.is_grad_enabled() or not layer.by_kernels:
        found = reference_gradients(lambda *given: _reference(layer, *given), layer.tensors, (dy, dh, dc))
        dx, dh0, dc0, *dweights = found
    else:
        dx, dh0, dc0, dweights = _backward(*inputs, y, *kept, dy, dh, dc, needs_dx, needs_dh0)
    return dx if needs_dx else None, dh0 if needs_dh0 else None, dc0, *dweights


_forward = define("lstm_variant", _FORWARD, _run, _fake)
_backward = define("lstm_variant_backward", _BACKWARD, _run_backward, _fake_backward)
differentiate(_forward, lambda *inputs: _Layer.of(*inputs).tensors, _save, _differentiate)
register(packet("lstm_variant"), packet("lstm_variant_backward"), weights_at=4, stash_at=13)
