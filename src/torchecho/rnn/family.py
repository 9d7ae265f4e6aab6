"""The operators of a family of recurrent layers: what lies between PyTorch and the kernels, the same for every family.

A family says what its layers take, stash and compute. From that come the operator of the forward and that of the
backward, both with their fakes for tracing, and the derivative: by the kernels, or through the reference where they do
not take the tensors or the gradient is to be differentiated again.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchecho.rnn.dispatch import NO_STASH, reference_gradients
from torchecho.rnn.flops import packet, register
from torchecho.rnn.gradients import LayerGradients, room
from torchecho.rnn.registration import define, differentiate


class Layer(Protocol):
    """One layer of one or two directions: what its operator was given, and how it is computed."""

    @property
    def x(self) -> Tensor:
        """Return the input, [T, B, I] or [rows, I]."""
        ...

    @property
    def first_states(self) -> tuple[Tensor, ...]:
        """Return h0 [D, B, P], and c0 [D, B, H] where there is one."""
        ...

    @property
    def weights(self) -> list[Tensor]:
        """Return the weights of all directions."""
        ...

    @property
    def by_kernels(self) -> bool:
        """Return whether the kernels run it."""
        ...

    @property
    def kernels(self) -> Any:
        """Return the module whose `forward` and `backward` run a direction of it."""
        ...

    def stash_room(self) -> tuple[Tensor, ...]:
        """Return what it stashes beside its output, not written yet."""
        ...

    def directions(self, y: Tensor, *stash: Tensor) -> Iterator[Any]:
        """Return each direction with its share of the output and of the stash."""
        ...

    def reference(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return the output and the last states, from x, the first states and the weights, in plain PyTorch."""
        ...


@dataclass(frozen=True)
class Family:
    """What the operators of a family are called, take and return.

    Attributes:
        name: Name of the operator; that of its backward ends in ``_backward``.
        inputs: Its arguments as in a schema: x, batch_sizes, first states, weights, other tensors, then options, among
            them ``stash`` where there is a choice.
        states: Names of the states.
        stash: Names of what is stashed beside the output.
        layer: Sorts the arguments.
    """

    name: str
    inputs: str
    states: tuple[str, ...]
    stash: tuple[str, ...]
    layer: Callable[..., Layer]

    def define(self) -> Any:
        """Define the operators and return that of the forward: of the arguments the output, last states, stash."""
        forward = define(self.name, self._schema, self._run, self._fake)
        backward = define(f"{self.name}_backward", self._backward_schema, self._run_backward, self._fake_backward)
        differentiate(forward, self._tensors, self._save, functools.partial(self._differentiate, backward), self._plain)
        packets = packet(self.name), packet(f"{self.name}_backward")
        stash_at = self._arguments.index("str stash") if "str stash" in self._arguments else None
        register(*packets, weights_at=self._weights_at, stash_at=stash_at)
        return forward

    @functools.cached_property
    def _arguments(self) -> tuple[str, ...]:
        return tuple(self.inputs.split(", "))

    @functools.cached_property
    def _weights_at(self) -> int:
        return self._arguments.index("Tensor[] weights")

    @functools.cached_property
    def _options_at(self) -> int:
        first = self._weights_at + 1
        return first + sum(text.startswith("Tensor") for text in self._arguments[first:])

    @property
    def _schema(self) -> str:
        return f"({self.inputs}) -> ({_named('Tensor', ('y', *self.states, *self.stash))})"

    @property
    def _backward_schema(self) -> str:
        kept = _named("Tensor", ("y", *self.stash))
        incoming = _named("Tensor?", [f"d{name}" for name in ("y", *self.states)])
        made = _named("Tensor", ["dx", *[f"d{name}0" for name in self.states]])
        given = f"{self.inputs}, {kept}, {incoming}, bool needs_dx, bool needs_dh0"
        return f"({given}) -> ({made}, Tensor[] dweights)"

    def _tensors(self, *inputs: Any) -> tuple[Tensor, ...]:
        return tensors_of(self.layer(*inputs))

    def _plain(self, *inputs: Any) -> tuple[Tensor, ...]:
        layer = self.layer(*inputs)
        return *layer.reference(*tensors_of(layer)), *layer.stash_room()

    def _run(self, *inputs: Any) -> tuple[Tensor, ...]:
        layer = self.layer(*inputs)
        if not layer.by_kernels:
            made = layer.reference(*tensors_of(layer))
            return *(tensor.clone() for tensor in made), *layer.stash_room()
        y, states, stash = _outputs(layer)
        for d, direction in enumerate(layer.directions(y, *stash)):
            for state, last in zip(states, layer.kernels.forward(direction), strict=True):
                state[d].copy_(last)
        return y, *states, *stash

    def _fake(self, *inputs: Any) -> tuple[Tensor, ...]:
        y, states, stash = _outputs(self.layer(*inputs))
        return y, *states, *stash

    def _run_backward(self, *arguments: Any) -> tuple[Any, ...]:
        inputs, (y, *others) = arguments[: len(self._arguments)], arguments[len(self._arguments) :]
        stash, (*incoming, needs_dx, needs_dh0) = others[: len(self.stash)], others[len(self.stash) :]
        layer = self.layer(*inputs)
        gradients = LayerGradients.of(layer.x, y, layer.first_states, incoming, needs_dx=needs_dx, needs_dh0=needs_dh0)
        dweights = []
        for d, direction in enumerate(layer.directions(y, *stash)):
            dweights += layer.kernels.backward(direction, gradients.of_direction(d)).tensors()
        return *gradients.of_inputs(), dweights

    def _fake_backward(self, *arguments: Any) -> tuple[Any, ...]:
        layer, (needs_dx, needs_dh0) = self.layer(*arguments[: len(self._arguments)]), arguments[-2:]
        h0, *others = layer.first_states
        dx, dh0 = room(layer.x, needed=needs_dx), room(h0, needed=needs_dh0)
        return dx, dh0, *[room(state, needed=True) for state in others], [room(w, needed=True) for w in layer.weights]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        """Keep what the backward reads; weights last, because there may be any number of them."""
        at, options_at = self._weights_at, self._options_at
        y, stash = outputs[0], outputs[1 + len(self.states) :]
        ctx.options = inputs[options_at:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*stash)
        ctx.save_for_backward(*inputs[:at], *inputs[at + 1 : options_at], y, *stash, *inputs[at])

    def _differentiate(self, backward: Any, ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        at, y_at = self._weights_at, self._options_at - 1
        saved, weights_at = ctx.saved_tensors, y_at + 1 + len(self.stash)
        inputs = (*saved[:at], list(saved[weights_at:]), *saved[at:y_at], *ctx.options)
        layer, (needs_dx, needs_dh0) = self.layer(*inputs), ctx.needs_input_grad[1:3]
        incoming = gradients[: 1 + len(self.states)]
        # A graph that was traced where no backward was to follow, and then gets one, has stashed nothing.
        has_stash = layer.by_kernels and NO_STASH not in ctx.options
        if torch.is_grad_enabled() or not has_stash or any(map(_is_batched, incoming)):
            dx, dh0, *others = reference_gradients(layer.reference, tensors_of(layer), incoming)
        else:
            kept = saved[y_at:weights_at]
            dx, dh0, *of_states, dweights = backward(*inputs, *kept, *incoming, needs_dx, needs_dh0)
            others = [*of_states, *dweights]
        return dx if needs_dx else None, dh0 if needs_dh0 else None, *others


def _is_batched(gradient: Tensor | None) -> bool:
    """Return whether a tensor stands for a batch of gradients, as in `torch.autograd.grad(is_grads_batched=True)`."""
    return gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient)  # noqa: SLF001 - no public way


def _named(kind: str, names: Sequence[str]) -> str:
    return ", ".join(f"{kind} {name}" for name in names)


def tensors_of(layer: Layer) -> tuple[Tensor, ...]:
    """Return what may need a gradient."""
    return (layer.x, *layer.first_states, *layer.weights)


def _outputs(layer: Layer) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return y, the last states and the stash, not written yet."""
    x, states = layer.x, layer.first_states
    D, _, P = states[0].shape
    return x.new_empty((*x.shape[:-1], D * P)), tuple(x.new_empty(s.shape) for s in states), layer.stash_room()
