"""LSTM variants: kernels and reference against formulas from the papers, gradients, and what masks do.

How far float32 may be off is the rule that torchecho's other layers keep towards torch.nn: three times the error of
plain PyTorch in float32, both against float64. torch.nn has no variants, so plain PyTorch is the reference.
"""

import itertools

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from tests.rnn.layers import ONE_ULP, asked_for, relative_errors, runnable, weights_like
from tests.rnn.variants import one_sequence
from torchecho.rnn import library
from torchecho.rnn.sequence import default_chunk_steps
from torchecho.rnn.variant import naive
from torchecho.rnn.variant.cell import Variant, noise_of, variant_weights
from torchecho.rnn.variant.op import lstm_variant
from torchecho.rnn.variant.stash import MODES, stash_bytes

NAMES = {
    "input": "weight_ih",
    "hidden": "weight_hh",
    "input_bias": "bias_ih",
    "hidden_bias": "bias_hh",
    "projection": "weight_hr",
    "input_norm": "norm_ih",
    "hidden_norm": "norm_hh",
    "cell_norm": "norm_c",
    "cell_bias": "norm_c_bias",
    "peephole": "peephole",
}
SWITCHES = [
    dict(zip(("layer_norm", "peephole", "coupled"), v, strict=True)) for v in itertools.product((0, 1), repeat=3)
]
NOISES = ("none", "drop", "zoneout", "expected", "both")
#: Rounding in float64 shows in the sixteenth digit, a wrong formula in one of the first: anything between tells them.
DOUBLE_TOLERANCE = 1e-10


class Layer:
    """One layer of a variant with its input and noise; everything differentiable is a leaf."""

    def __init__(self, switches, noise="none", *, T=9, B=4, I=3, H=7, P=0, directions=1, bias=True, lengths=None):  # noqa: E741
        self.switches = {name: bool(value) for name, value in switches.items()}
        self.shares = (0.3, 0.2) if noise == "expected" else (0.0, 0.0)
        self.variant = Variant(**self.switches, zoneout_cell=self.shares[0], zoneout_hidden=self.shares[1])
        width = self.variant.gates * H
        outputs = P or H
        shapes = [(width, I), (width, outputs), *([(width,)] * 2 if bias else []), *([(P, H)] if P else [])]
        if self.variant.layer_norm:
            shapes += [(width,), (width,), (H,), *([(H,)] if bias else [])]
        if self.variant.peephole:
            shapes.append((width - H,))
        self.weights = [torch.empty(s).uniform_(-1, 1).mul(H**-0.5) for _ in range(directions) for s in shapes]
        self.states = tuple(torch.randn(directions, B, size) for size in (outputs, H))
        self.x, self.batch_sizes, self.lengths = torch.randn(T, B, I), None, lengths or [T] * B
        if lengths:
            self.x, self.batch_sizes = pack_padded_sequence(self.x, torch.tensor(lengths))[:2]
        rows = self.x.shape[:-1].numel()
        drop = torch.empty(directions, B, outputs).bernoulli_(0.7) / 0.7 if noise in ("drop", "both") else None
        masks = [None, None]
        if noise in ("zoneout", "both"):
            sizes = [(directions, rows, size) for size in (H, outputs)]
            masks = [torch.empty(size, dtype=torch.uint8).bernoulli_(0.4) for size in sizes]
        self.drawn = (drop, *masks)
        for leaf in self.leaves:
            leaf.requires_grad_()

    @property
    def leaves(self):
        return [self.x, *self.states, *self.weights]

    def to(self, dtype):
        other = Layer.__new__(Layer)
        other.__dict__.update(self.__dict__)
        other.x, *rest = (leaf.detach().to(dtype).requires_grad_() for leaf in self.leaves)
        other.states, other.weights = tuple(rest[:2]), rest[2:]
        other.drawn = (None if self.drawn[0] is None else self.drawn[0].to(dtype), *self.drawn[1:])
        return other

    def run(self, mode="lean"):
        return lstm_variant(self.x, self.batch_sizes, self.states, self.weights, self.variant, self.drawn, mode)

    def gradients(self, outputs, weights):
        return [*outputs, *torch.autograd.grad(outputs, self.leaves, weights)]

    def by_reference(self):
        directions = self.states[0].shape[0]
        weights = variant_weights(self.weights, self.variant, directions)
        noise = [noise_of(*self.drawn, d) for d in range(directions)]
        return naive.layer(self.x, self.batch_sizes, *self.states, weights, self.variant, noise)

    def assert_as_right_as_plain_pytorch(self):
        """Compare the kernels' error with that of the reference in float32, both with the reference in float64.

        What counts is the reference's worst result: one of a few elements may be right by luck.
        """
        exact, weights = self.to(torch.float64), weights_like(self.run())
        wanted = exact.gradients(exact.by_reference(), [w.double() for w in weights])
        theirs = relative_errors(self.gradients(self.by_reference(), weights), wanted)
        for mode in MODES:
            ours = relative_errors(self.gradients(self.run(mode), weights), wanted)
            assert max(ours) <= 3 * max(*theirs, ONE_ULP[torch.float32]), (ours, theirs)

    def by_paper(self):
        """Run every sequence by itself."""
        starts = [sum(sum(n > s for n in self.lengths) for s in range(t)) for t in range(max(self.lengths) + 1)]
        rows = self.x.reshape(-1, self.x.shape[-1])
        directions, B, P = self.states[0].shape
        y = [[None] * len(rows) for _ in range(directions)]
        last = [[[None] * B for _ in range(directions)] for _ in range(2)]
        for d, w in enumerate(variant_weights(self.weights, self.variant, directions)):
            named = {name: t for field, name in NAMES.items() if (t := getattr(w, field)) is not None}
            for b, length in enumerate(self.lengths):
                places = [starts[t] + b for t in range(length)][:: -1 if d else 1]
                drop = None if self.drawn[0] is None else self.drawn[0][d, b]
                zones = [None if m is None else m[d, places].to(rows.dtype) for m in self.drawn[1:]]
                if self.shares[0]:
                    sizes = zip((self.states[1].shape[2], P), self.shares, strict=True)
                    zones = [torch.full((length, size), share, dtype=rows.dtype) for size, share in sizes]
                zones = dict(zip(("zone_cell", "zone_hidden"), zones, strict=True))
                out, h, c = one_sequence(
                    rows[places], self.states[0][d, b], self.states[1][d, b], named, self.switches, drop=drop, **zones
                )
                for place, row in zip(places, out, strict=True):
                    y[d][place] = row
                last[0][d][b], last[1][d][b] = h, c
        stacked = torch.cat([torch.stack(out) for out in y], -1).view(*self.x.shape[:-1], directions * P)
        return (stacked, *(torch.stack([torch.stack(each) for each in state]) for state in last))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "".join(map(str, s.values())))
def test_formulas_of_the_papers(switches, noise):
    layer = Layer(switches, noise, directions=2, lengths=[9, 9, 5, 1])
    exact = layer.to(torch.float64)
    weights = weights_like(exact.run())
    wanted = exact.gradients(exact.by_paper(), weights)
    assert max(relative_errors(exact.gradients(exact.run(), weights), wanted)) < DOUBLE_TOLERANCE
    layer.assert_as_right_as_plain_pytorch()


@pytest.mark.parametrize("noise", ["none", "both", "expected"])
@pytest.mark.parametrize("switches", [SWITCHES[0], SWITCHES[-2], SWITCHES[-1]], ids=lambda s: str(list(s.values())))
@pytest.mark.parametrize("sizes", [{}, {"H": 40, "P": 33, "bias": False}])
def test_projection(sizes, switches, noise):
    layer = Layer(switches, noise, **{"P": 5, "directions": 2, "lengths": [9, 9, 5, 1], **sizes})
    exact = layer.to(torch.float64)
    weights = weights_like(exact.run())
    wanted = exact.gradients(exact.by_paper(), weights)
    assert max(relative_errors(exact.gradients(exact.run(), weights), wanted)) < DOUBLE_TOLERANCE
    layer.assert_as_right_as_plain_pytorch()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 3, 2, 1), (3, 4, 5, 40), (150, 9, 3, 19), (1, 1, 40, 130), (6, 130, 5, 20)])
def test_shapes_and_chunks(shape, bias):
    T, B, I, H = shape  # noqa: E741 - I inputs
    switches = {"layer_norm": H > 1, "peephole": 1, "coupled": 0}
    Layer(switches, "both", T=T, B=B, I=I, H=H, bias=bias).assert_as_right_as_plain_pytorch()


@pytest.mark.parametrize("variant", library.VARIANTS)
def test_every_build_agrees_with_the_reference(variant):
    if not runnable(variant):
        pytest.skip(f"this processor runs no {variant}")
    with asked_for(variant):
        for coupled in (0, 1):
            switches = {"layer_norm": 1, "peephole": 1, "coupled": coupled}
            Layer(switches, "both", H=37, lengths=[9, 7, 7, 2]).assert_as_right_as_plain_pytorch()


@pytest.mark.parametrize("projection", [0, 5])
@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "".join(map(str, s.values())))
def test_both_modes_give_the_same_bits_and_nothing_unwritten_is_read(switches, projection, monkeypatch):
    layer = Layer(switches, "both", T=70, B=5, H=37, P=projection, directions=2, lengths=[70, 70, 41, 9, 1])
    weights = weights_like(layer.run())
    results = [layer.gradients(layer.run(mode), weights) for mode in MODES]
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan")))
    results += [layer.gradients(layer.run(mode), weights) for mode in MODES]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_the_output_alone_with_projection(mode):
    layer = Layer(SWITCHES[0], P=3, T=6, B=5, H=7)
    found, wanted = (torch.autograd.grad(run[0].sum(), layer.leaves) for run in (layer.run(mode), layer.by_reference()))
    for have, want in zip(found, wanted, strict=True):
        assert have.shape == want.shape
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize(("mode", "passes"), [("gates", 3), ("lean", 4)])
def test_flops_are_those_of_the_products(mode, passes):
    T, B, I, H, P = 9, 4, 3, 7, 5  # noqa: E741 - I inputs
    layer = Layer(SWITCHES[-1], "both", P=P, directions=2)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        outputs = layer.run(mode)
        layer.gradients(outputs, weights_like(outputs))
    gates, projection = 2 * T * B * 3 * H * (I + P), 2 * T * B * H * P  # three gates: the last switch couples two
    assert counter.get_total_flops() == 2 * (passes * gates + 3 * projection)


@pytest.mark.parametrize("mode", MODES)
def test_a_stash_may_be_read_twice(mode):
    layer = Layer({"layer_norm": 1, "peephole": 1, "coupled": 0}, "both", T=150)
    outputs = layer.run(mode)
    weights = weights_like(outputs)
    first = torch.autograd.grad(outputs, layer.leaves, weights, retain_graph=True)
    again = torch.autograd.grad(outputs, layer.leaves, weights)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "".join(map(str, s.values())))
def test_gradcheck(switches):
    layer = Layer(switches, "both", T=4, B=3, H=4, directions=2, lengths=[4, 2, 1]).to(torch.float64)

    def run(x, h, c, *weights):
        return lstm_variant(x, layer.batch_sizes, (h, c), list(weights), layer.variant, layer.drawn, "lean")

    assert torch.autograd.gradcheck(run, layer.leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, layer.leaves, fast_mode=True)


def test_kernels_have_second_derivatives_by_the_reference():
    layer = Layer({"layer_norm": 1, "peephole": 0, "coupled": 0})
    exact, seconds = layer.to(torch.float64), []
    for own in (layer, exact):
        (first,) = torch.autograd.grad(own.run()[0].sum(), own.weights[1], create_graph=True)
        seconds.append(torch.autograd.grad(first.pow(2).sum(), own.x)[0])
    torch.testing.assert_close(seconds[0].double(), seconds[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("switches", [SWITCHES[0], SWITCHES[-1]], ids=["none", "all"])
def test_stash_has_the_bytes_that_are_foretold(mode, switches):
    T, B, H = 150, 4, 7
    layer = Layer(switches, T=T, B=B, H=H)
    sizes = {}

    def keep(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = layer.run(mode)
    others = {tensor.untyped_storage().data_ptr() for tensor in (*layer.leaves, outputs[0])}
    found = sum(size for at, size in sizes.items() if at not in others)
    chunk_steps = default_chunk_steps(B, H)
    variant = layer.variant
    expected = stash_bytes(
        mode, T=T, B=B, H=H, chunk_steps=chunk_steps, gates=variant.gates, layer_norm=variant.layer_norm
    )
    assert found == expected


def test_opcheck():
    layer = Layer({"layer_norm": 1, "peephole": 1, "coupled": 1}, "both")
    op = torch.ops.torchecho.lstm_variant.default
    arguments = (*layer.states, layer.weights, *layer.drawn, True, True, True, 0.0, 0.0, "gates", 64)
    torch.library.opcheck(op, (layer.x, None, *arguments))
