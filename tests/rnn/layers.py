"""Layers, inputs and references that the tests of kernels share."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from torchecho.rnn import library
from torchecho.rnn.asked import asked_variant
from torchecho.rnn.elman.op import elman
from torchecho.rnn.gru.op import gru
from torchecho.rnn.lstm.op import lstm

#: Every kernel family with every way to run it.
MODES = {"lstm": ("gates", "preact", "cell", "lean"), "gru": ("gates", "lean"), "elman": ("tanh", "relu")}
EVERY = [(family, mode) for family, modes in MODES.items() for mode in modes]
#: Of the largest element; an error below it is luck, such as that of a tensor of one element.
ONE_ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}
_OPS = {"lstm": lstm, "gru": gru, "elman": elman}
_GATES = {"lstm": 4, "gru": 3, "elman": 1}


def runnable(variant):
    """Return whether this processor runs a variant of the kernels."""
    order = list(reversed(library.VARIANTS))
    return order.index(variant) <= order.index(library.widest_variant())


@contextlib.contextmanager
def asked_for(variant):
    """Run layers by the kernels that TORCHECHO_RNN_VARIANT asks for by this name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHECHO_RNN_VARIANT", variant)
        asked_variant.cache_clear()
        try:
            yield
        finally:
            asked_variant.cache_clear()


@dataclass(frozen=True)
class Case:
    """One layer and its input; everything differentiable is a leaf."""

    family: str
    x: torch.Tensor
    batch_sizes: torch.Tensor | None
    states: tuple[torch.Tensor, ...]
    weights: list[torch.Tensor]

    @property
    def leaves(self):
        return [self.x, *self.states, *self.weights]

    def run(self, mode):
        return _OPS[self.family](self.x, self.batch_sizes, *self.states, self.weights, mode)

    def gradients(self, mode, weights=None):
        """Return outputs and the gradients of all leaves, for a weighted sum of all outputs."""
        outputs = self.run(mode)
        weights = weights_like(outputs) if weights is None else weights
        return [*outputs, *torch.autograd.grad(outputs, self.leaves, weights)]

    def to(self, dtype):
        def leaf(tensor):
            return tensor.detach().to(dtype).requires_grad_()

        return Case(
            self.family, leaf(self.x), self.batch_sizes, tuple(map(leaf, self.states)), list(map(leaf, self.weights))
        )

    def by_torch(self, mode, weights):
        """Return what torch.nn makes of it, in the order of `gradients`."""
        directions, _, output = self.states[0].shape
        hidden = self.states[-1].shape[2]
        projected = output if output != hidden else 0
        kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "elman": torch.nn.RNN}[self.family]
        extra = {"nonlinearity": mode} if self.family == "elman" else {"proj_size": projected} if projected else {}
        per_direction = len(self.weights) // directions
        module = kind(self.x.shape[-1], hidden, bias=per_direction >= 4, bidirectional=directions == 2, **extra)
        for parameter, weight in zip(module.parameters(), self.weights, strict=True):
            parameter.data = weight.detach().clone()
        x = self.x if self.batch_sizes is None else PackedSequence(self.x, self.batch_sizes)
        y, hx = module(x, self.states if self.family == "lstm" else self.states[0])
        outputs = [y if self.batch_sizes is None else y.data, *(hx if isinstance(hx, tuple) else (hx,))]
        return [*outputs, *torch.autograd.grad(outputs, [self.x, *self.states, *module.parameters()], weights)]


def case(family, T, B, I, H, *, directions=1, projection=0, bias=True, lengths=None, dtype=torch.float32):  # noqa: E741 - I inputs
    """Make a layer with torch.nn's distribution of weights."""
    output, rows, bound = projection or H, _GATES[family] * H, H**-0.5
    shapes = [(rows, I), (rows, output), *([(rows,)] * 2 if bias else []), *([(output, H)] if projection else [])]

    def leaf(tensor):
        return tensor.to(dtype).requires_grad_()

    weights = [leaf(torch.empty(shape).uniform_(-bound, bound)) for _ in range(directions) for shape in shapes]
    sizes = (output, H) if family == "lstm" else (H,)
    states = tuple(leaf(torch.randn(directions, B, size)) for size in sizes)
    x, batch_sizes = torch.randn(T, B, I), None
    if lengths is not None:
        x, batch_sizes = pack_padded_sequence(x, torch.tensor(lengths))[:2]
    return Case(family, leaf(x), batch_sizes, states, weights)


def weights_like(outputs):
    return [torch.randn_like(output) for output in outputs]


def relative_errors(found, exact):
    """Return the norm of each tensor's error relative to the norm of the tensor.

    The largest error of some hundred elements is one draw of a roundoff: of two correct ways one is easily three times
    luckier than the other. Norms of both differ by what they do.
    """
    pairs = [(f.detach().double(), e.detach()) for f, e in zip(found, exact, strict=True)]
    return [float((f - e).norm() / e.norm().clamp_min(1e-30)) for f, e in pairs]
