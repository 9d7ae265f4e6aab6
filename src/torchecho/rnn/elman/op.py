"""One Elman RNN layer as a PyTorch operator."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchecho.rnn.dispatch import kernels_for, reference_gradients, runs_natively
from torchecho.rnn.elman import naive, native
from torchecho.rnn.flops import packet, register
from torchecho.rnn.gradients import LayerGradients, room
from torchecho.rnn.registration import define, differentiate
from torchecho.rnn.sequence import courses_of, default_chunk_steps
from torchecho.rnn.weights import weights_of

_INPUTS = "Tensor x, Tensor? batch_sizes, Tensor h0, Tensor[] weights, str nonlinearity, SymInt chunk_steps"
_FORWARD = f"({_INPUTS}) -> (Tensor y, Tensor h)"
_BACKWARD = (
    f"({_INPUTS}, Tensor y, Tensor? dy, Tensor? dh, bool needs_dx, bool needs_dh0)"
    " -> (Tensor dx, Tensor dh0, Tensor[] dweights)"
)


def elman(
    x: Tensor, batch_sizes: Tensor | None, h0: Tensor, weights: list[Tensor], nonlinearity: str
) -> tuple[Tensor, Tensor]:
    """Run one layer of one or two directions.

    Args:
        x: Padded input [T, B, I], or packed input [rows, I].
        batch_sizes: Rows of each step [T] of packed input, on the CPU.
        h0: First h, [D, B, H].
        weights: Of each direction in torch.nn's order: input, hidden, then both biases if any.
        nonlinearity: "tanh" or "relu".

    Returns:
        The output, [T, B, D * H] or [rows, D * H], and the last h of each sequence.
    """
    _, B, H = h0.shape
    chunk_steps = default_chunk_steps(B, H, x.device.type)
    y, h = _forward(x, batch_sizes, h0, weights, nonlinearity, chunk_steps)
    return y, h


@dataclass(frozen=True)
class _Layer:
    """The inputs of the operator."""

    x: Tensor
    batch_sizes: Tensor | None
    h0: Tensor
    weights: list[Tensor]
    nonlinearity: str
    chunk_steps: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return what may need a gradient."""
        return (self.x, self.h0, *self.weights)

    @functools.cached_property
    def by_kernels(self) -> bool:
        """Return whether the kernels run it."""
        return runs_natively(self.tensors)

    @functools.cached_property
    def kernels(self) -> Any:
        """Return the module of the kernels that run it."""
        return kernels_for("elman", self.tensors)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return y, h, not written yet."""
        x, (D, _, H) = self.x, self.h0.shape
        return x.new_empty((*x.shape[:-1], D * H)), x.new_empty(self.h0.shape)

    def directions(self, y: Tensor) -> Iterator[native.Direction]:
        """Return each direction with its share of the output."""
        D, _, H = self.h0.shape
        rows, courses = y.flatten(0, -2), courses_of(self.x, self.batch_sizes, D, self.chunk_steps)
        for d, (course, weights) in enumerate(zip(courses, weights_of(self.weights, D), strict=True)):
            yield native.Direction(
                course=course,
                relu=self.nonlinearity == "relu",
                x=self.x,
                h0=self.h0[d],
                weights=weights,
                y=rows[:, d * H : (d + 1) * H],
            )


def _run(*inputs: Any) -> tuple[Tensor, ...]:
    layer = _Layer(*inputs)
    if not layer.by_kernels:
        return tuple(t.clone() for t in _reference(layer, *layer.tensors))
    y, h = layer.outputs()
    for d, direction in enumerate(layer.directions(y)):
        h[d].copy_(layer.kernels.forward(direction))
    return y, h


def _fake(*inputs: Any) -> tuple[Tensor, ...]:
    return _Layer(*inputs).outputs()


def _run_backward(*inputs: Any) -> tuple[Any, ...]:
    layer, (y, dy, dh, needs_dx, needs_dh0) = _Layer(*inputs[:6]), inputs[6:]
    gradients = LayerGradients.of(layer.x, y, [layer.h0], [dy, dh], needs_dx=needs_dx, needs_dh0=needs_dh0)
    dweights = []
    for d, direction in enumerate(layer.directions(y)):
        dweights += layer.kernels.backward(direction, gradients.of_direction(d)).tensors()
    return *gradients.of_inputs(), dweights


def _fake_backward(*inputs: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    layer, (needs_dx, needs_dh0) = _Layer(*inputs[:6]), inputs[-2:]
    dx, dh0 = room(layer.x, needed=needs_dx), room(layer.h0, needed=needs_dh0)
    return dx, dh0, [room(w, needed=True) for w in layer.weights]


def _reference(layer: _Layer, x: Tensor, h0: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return naive.layer(x, layer.batch_sizes, h0, weights_of(weights, h0.shape[0]), layer.nonlinearity)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, batch_sizes, h0, weights, ctx.nonlinearity, ctx.chunk_steps = inputs
    y, _ = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, batch_sizes, h0, y, *weights)


def _differentiate(ctx: Any, dy: Any, dh: Any, *_: Any) -> tuple[Any, ...]:
    x, batch_sizes, h0, y, *weights = ctx.saved_tensors
    inputs = (x, batch_sizes, h0, weights, ctx.nonlinearity, ctx.chunk_steps)
    layer, (needs_dx, needs_dh0) = _Layer(*inputs), ctx.needs_input_grad[1:3]
    if torch.is_grad_enabled() or not layer.by_kernels:
        found = reference_gradients(lambda *inputs: _reference(layer, *inputs), layer.tensors, (dy, dh))
        dx, dh0, *dweights = found
    else:
        dx, dh0, dweights = _backward(*inputs, y, dy, dh, needs_dx, needs_dh0)
    return dx if needs_dx else None, dh0 if needs_dh0 else None, *dweights


_forward = define("elman", _FORWARD, _run, _fake)
_backward = define("elman_backward", _BACKWARD, _run_backward, _fake_backward)
differentiate(_forward, lambda *inputs: _Layer(*inputs).tensors, _save, _differentiate)
register(packet("elman"), packet("elman_backward"), weights_at=3, stash_at=None)
