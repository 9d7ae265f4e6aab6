"""The operators as PyTorch wants them: opcheck, gradcheck, gradgradcheck; what they stash, to the byte."""

import pytest
import torch

from tests.rnn.layers import EVERY, MODES, case, weights_like
from torchecho.rnn.gru import stash as gru_stash
from torchecho.rnn.lstm import stash as lstm_stash
from torchecho.rnn.sequence import default_chunk_steps

SMALL = {"T": 3, "B": 2, "I": 3, "H": 4}


def arguments(layer, mode, chunk_steps=2):
    return (layer.x, layer.batch_sizes, *layer.states, layer.weights, mode, chunk_steps)


@pytest.mark.parametrize(("family", "mode"), EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck(family, mode, dtype):
    layer = case(family, **SMALL, directions=2, dtype=dtype)
    torch.library.opcheck(getattr(torch.ops.torchecho, family).default, arguments(layer, mode))


@pytest.mark.parametrize(("family", "mode"), [(f, MODES[f][-1]) for f in MODES])
def test_opcheck_of_packed_input(family, mode):
    layer = case(family, **SMALL, lengths=(3, 1))
    torch.library.opcheck(getattr(torch.ops.torchecho, family).default, arguments(layer, mode))


@pytest.mark.parametrize(("family", "mode"), [("lstm", "lean"), ("gru", "lean"), ("elman", "tanh")])
@pytest.mark.parametrize("lengths", [None, (3, 1)])
def test_first_and_second_derivatives(family, mode, lengths):
    projection = {"projection": 2} if family == "lstm" else {}
    layer = case(family, **SMALL, directions=2, lengths=lengths, dtype=torch.float64, **projection)

    def run(x, *others):
        states, weights = others[: len(layer.states)], list(others[len(layer.states) :])
        return type(layer)(family, x, layer.batch_sizes, states, weights).run(mode)

    assert torch.autograd.gradcheck(run, layer.leaves)
    assert torch.autograd.gradgradcheck(run, layer.leaves)


@pytest.mark.parametrize(("family", "mode"), EVERY)
@pytest.mark.parametrize("directions", [1, 2])
def test_gradients_that_nobody_wants_change_no_others(family, mode, directions):
    layer = case(family, T=9, B=4, I=5, H=17, directions=directions)
    outputs = layer.run(mode)
    weights = weights_like(outputs)
    every = torch.autograd.grad(outputs, layer.leaves, weights)
    x, states = layer.x.detach(), [state.detach() for state in layer.states]
    alone = type(layer)(family, x, layer.batch_sizes, states, layer.weights)
    found = torch.autograd.grad(alone.run(mode), layer.weights, weights)
    expected = every[1 + len(states) :]
    assert [t.tolist() for t in found] == [t.tolist() for t in expected]


@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_second_derivatives_through_the_kernels(family, mode):
    layer = case(family, T=5, B=3, I=4, H=6)
    exact = layer.to(torch.float64)
    seconds = []
    for one in (layer, exact):
        (first,) = torch.autograd.grad(one.run(mode)[0].square().sum(), one.x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), one.leaves))
    for found, expected in zip(*seconds, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def saved_bytes(layer, mode):
    """Return the bytes that autograd keeps for a layer's backward, besides its leaves and its output."""
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, *_ = layer.run(mode)
    for known in (y, *layer.leaves):
        saved.pop(known.untyped_storage().data_ptr(), None)
    return sum(saved.values())


@pytest.mark.parametrize("mode", MODES["lstm"])
@pytest.mark.parametrize("T", [1, 7, 40])
def test_lstm_stashes_what_it_says(mode, T):
    layer = case("lstm", T=T, B=64, I=3, H=10)
    expected = lstm_stash.stash_bytes(mode, T=T, B=64, H=10, chunk_steps=default_chunk_steps(64, 10))
    assert saved_bytes(layer, mode) == expected


@pytest.mark.parametrize(
    ("mode", "kept"), [("gates", "gates"), ("preact", "gates"), ("cell", "cell"), ("lean", "lean")]
)
def test_an_lstm_of_bfloat16_stashes_half_gates_and_whole_cells(mode, kept):
    layer = case("lstm", T=40, B=64, I=3, H=10, dtype=torch.bfloat16)
    sizes = {"T": 40, "B": 64, "H": 10, "chunk_steps": default_chunk_steps(64, 10)}
    assert saved_bytes(layer, mode) == lstm_stash.stash_bytes(kept, **sizes, itemsize=2)


@pytest.mark.parametrize("mode", MODES["gru"])
def test_a_gru_of_bfloat16_stashes_half(mode):
    sizes = {"T": 7, "B": 64, "H": 10}
    whole = gru_stash.stash_bytes(mode, **sizes, chunk_steps=default_chunk_steps(64, 10))
    assert saved_bytes(case("gru", **sizes, I=3, dtype=torch.bfloat16), mode) == whole / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["lstm", "gru"])
def test_without_a_plan_auto_stashes_the_least(family, dtype):
    layer = case(family, T=40, B=64, I=3, H=10, dtype=dtype)
    assert saved_bytes(layer, "auto") == saved_bytes(layer, "lean")
    weights = weights_like(layer.run("lean"))
    pairs = zip(layer.gradients("auto", weights), layer.gradients("lean", weights), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("mode", MODES["gru"])
def test_gru_stashes_what_it_says(mode):
    layer = case("gru", T=7, B=64, I=3, H=10)
    assert saved_bytes(layer, mode) == gru_stash.stash_bytes(
        mode, T=7, B=64, H=10, chunk_steps=default_chunk_steps(64, 10)
    )


@pytest.mark.parametrize("mode", MODES["elman"])
def test_an_elman_layer_stashes_nothing(mode):
    assert saved_bytes(case("elman", T=7, B=64, I=3, H=10), mode) == 0


@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_without_a_backward_nothing_is_stashed(family, mode, monkeypatch):
    layer = case(family, T=7, B=6, I=3, H=10)
    sizes = []
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *a, **k: sizes.append(a) or empty(t, *a, **k))
    with torch.no_grad():
        layer.run(mode)
    assert (1, 42, 40) not in [a[0] for a in sizes]


@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_chunks_of_any_length_give_the_same_results(family, mode):
    layer = case(family, T=11, B=3, I=4, H=9, directions=2, lengths=(11, 6, 2))
    op = getattr(torch.ops.torchecho, family)
    results = []
    for chunk_steps in (1, 2, 4, 11, 50):
        outputs = op(*arguments(layer, mode, chunk_steps))[: 1 + len(layer.states)]
        torch.manual_seed(1)
        results.append([*outputs, *torch.autograd.grad(outputs, layer.leaves, weights_like(outputs))])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_compiles_for_sizes_that_change(family, mode):
    layer = case(family, **SMALL)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def run(x, *states):
        return type(layer)(family, x, None, states, layer.weights).run(mode)[0]

    for T, B in ((3, 2), (5, 4), (9, 3)):
        x, states = torch.randn(T, B, 3), [torch.randn(1, B, 4) for _ in layer.states]
        expected = type(layer)(family, x, None, tuple(states), layer.weights).run(mode)[0]
        torch.testing.assert_close(run(x, *states), expected)


@pytest.mark.parametrize(("mode", "passes"), [("gates", 3), ("preact", 3), ("cell", 4), ("lean", 4)])
def test_flops_are_those_of_the_products(mode, passes):
    T, B, I, H, P = 3, 2, 5, 4, 2  # noqa: E741 - I inputs
    layer = case("lstm", T=T, B=B, I=I, H=H, projection=P, directions=2)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        layer.gradients(mode)
    gates, projection = 2 * T * B * 4 * H * (I + P), 2 * T * B * H * P
    assert counter.get_total_flops() == 2 * (passes * gates + 3 * projection)  # in two directions
