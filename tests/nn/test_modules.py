"""torchecho.nn against torch.nn: parameters, results and gradients of every combination of arguments."""

import itertools
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import torchecho.nn
from torchecho.rnn.sequence import default_chunk_steps

KINDS = ("LSTM", "GRU", "RNN")
T, B, I, H = 6, 5, 4, 7  # noqa: E741 - as everywhere, I is the number of inputs

# oneDNN says once a process that it leaves projections to others.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def pair(kind, *args, stash="auto", **kwargs):
    theirs = getattr(torch.nn, kind)(*args, **kwargs)
    ours = getattr(torchecho.nn, kind)(*args, stash=stash, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def flat(result):
    """List the tensors of what a module returns."""
    y, hx = result
    y = y.data if isinstance(y, PackedSequence) else y
    return [y, *(hx if isinstance(hx, tuple) else (hx,))]


def first_states(module, *, batched=True):
    directions = module.num_layers * (2 if module.bidirectional else 1)
    sizes = [module.proj_size or module.hidden_size, module.hidden_size]
    states = [torch.randn(directions, *((B,) if batched else ()), size, requires_grad=True) for size in sizes]
    return tuple(states) if type(module).__name__ == "LSTM" else states[0]


def assert_same(theirs, ours, x, hx=None, *, rtol=1e-4, atol=1e-5):
    """Compare outputs and every gradient, all outputs weighted at random."""
    data = x.data if isinstance(x, PackedSequence) else x
    leaves = [data] if data.requires_grad else []
    leaves += [] if hx is None else list(hx) if isinstance(hx, tuple) else [hx]
    expected, found = flat(theirs(x, hx)), flat(ours(x, hx))
    weights = [torch.randn_like(o) for o in expected]
    want = torch.autograd.grad(expected, [*leaves, *theirs.parameters()], weights)
    have = torch.autograd.grad(found, [*leaves, *ours.parameters()], weights)
    for w, h in zip([*expected, *want], [*found, *have], strict=True):
        torch.testing.assert_close(h, w, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layers", "both_ways", "bias", "batch_first"), list(itertools.product((1, 3), *[(False, True)] * 3))
)
def test_same_results_and_gradients(kind, layers, both_ways, bias, batch_first):
    theirs, ours = pair(kind, I, H, layers, bias=bias, bidirectional=both_ways, batch_first=batch_first)
    x = torch.randn((B, T, I) if batch_first else (T, B, I), requires_grad=True)
    assert_same(theirs, ours, x)
    assert_same(theirs, ours, x, first_states(theirs))


@pytest.mark.parametrize("stash", torchecho.nn.LSTM.modes())
@pytest.mark.parametrize(("layers", "both_ways", "bias"), [(1, False, True), (2, True, True), (2, True, False)])
def test_projection_in_every_stash_mode(stash, layers, both_ways, bias):
    theirs, ours = pair("LSTM", I, H, layers, bias=bias, bidirectional=both_ways, proj_size=3, stash=stash)
    assert_same(theirs, ours, torch.randn(T, B, I, requires_grad=True), first_states(theirs))


@pytest.mark.parametrize("stash", torchecho.nn.GRU.modes())
def test_gru_in_every_stash_mode(stash):
    theirs, ours = pair("GRU", I, H, 2, bidirectional=True, stash=stash)
    assert_same(theirs, ours, torch.randn(T, B, I, requires_grad=True), first_states(theirs))


def test_relu():
    theirs, ours = pair("RNN", I, H, 2, "relu", False, True, bidirectional=True)
    assert ours.batch_first
    assert not ours.bias
    assert_same(theirs, ours, torch.randn(B, T, I, requires_grad=True), first_states(theirs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_unbatched(kind, batch_first):
    theirs, ours = pair(kind, I, H, 2, bidirectional=True, batch_first=batch_first)
    x = torch.randn(T, I, requires_grad=True)
    assert_same(theirs, ours, x)
    assert_same(theirs, ours, x, first_states(theirs, batched=False))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(6, 6, 4, 2, 1), (1, 1, 1, 1, 1), (6, 6, 6, 6, 6), (6, 1, 1, 1, 1)])
def test_packed(kind, lengths):
    theirs, ours = pair(kind, I, H, 2, bidirectional=True)
    packed = pack_padded_sequence(torch.randn(T, B, I), torch.tensor(lengths))
    x = packed._replace(data=packed.data.requires_grad_())
    assert_same(theirs, ours, x)
    assert_same(theirs, ours, x, first_states(theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_in_any_order(kind):
    theirs, ours = pair(kind, I, H, 2, bidirectional=True)
    sequences = [torch.randn(length, I) for length in (2, 5, 1, 4, 4)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    assert_same(theirs, ours, packed._replace(data=packed.data.requires_grad_()), first_states(theirs))
    assert torch.equal(ours(packed)[0].unsorted_indices, packed.unsorted_indices)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_draws_as_torch_does(kind):
    theirs, ours = pair(kind, I, H, 3, dropout=0.4)
    x = torch.randn(T, B, I)
    torch.manual_seed(5)
    expected = theirs(x)[0]
    torch.manual_seed(5)
    torch.testing.assert_close(ours(x)[0], expected)
    torch.testing.assert_close(ours.eval()(x)[0], theirs.eval()(x)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_and_draws_of_parameters(kind):
    arguments = (I, H, 2, True, False, 0.0, True) if kind != "RNN" else (I, H, 2, "tanh", True, False, 0.0, True)
    torch.manual_seed(3)
    theirs = getattr(torch.nn, kind)(*arguments)
    torch.manual_seed(3)
    ours = getattr(torchecho.nn, kind)(*arguments)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert [[p.shape for p in ps] for ps in ours.all_weights] == [[p.shape for p in ps] for ps in theirs.all_weights]
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_input_that_needs_no_gradient_and_frozen_weights(kind):
    theirs, ours = pair(kind, I, H, 2)
    x = torch.randn(T, B, I)
    assert_same(theirs, ours, x)
    for module in (theirs, ours):
        module.weight_hh_l0.requires_grad_(False)
        module(x)[0].sum().backward()
    assert ours.weight_hh_l0.grad is None
    torch.testing.assert_close(ours.weight_ih_l0.grad, theirs.weight_ih_l0.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_last_state_is_used(kind):
    theirs, ours = pair(kind, I, H, 2)
    x = torch.randn(T, B, I, requires_grad=True)
    grads = []
    for module in (theirs, ours):
        flat(module(x))[-1].square().sum().backward()
        grads.append(x.grad)
        x.grad = None
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, B, I), (T, 1, I), (1, 1, I), (T, 0, I)])
def test_lengths_and_batches_of_zero_and_one(kind, shape):
    theirs, ours = pair(kind, I, H, 2, bidirectional=True)
    assert_same(theirs, ours, torch.randn(shape, requires_grad=True))


@pytest.mark.parametrize("kind", KINDS)
def test_non_contiguous_input_states_and_gradient(kind):
    theirs, ours = pair(kind, I, H)
    x = torch.randn(B, T, 2 * I, requires_grad=True)
    states = torch.randn(1, H, B).transpose(1, 2)
    hx = (states, states) if kind == "LSTM" else states
    grads = []
    for module in (theirs, ours):
        module(x.transpose(0, 1)[:, :, ::2], hx)[0].sum().backward()
        grads.append(x.grad)
        x.grad = None
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("kind", KINDS)
def test_retain_graph_gives_the_same_gradients_again(kind):
    for stash in getattr(torchecho.nn, kind).modes():
        module = getattr(torchecho.nn, kind)(I, H, 2, stash=stash)
        y = module(torch.randn(T, B, I))[0].square().sum()
        first = torch.autograd.grad(y, list(module.parameters()), retain_graph=True)
        second = torch.autograd.grad(y, list(module.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_tensors_of_their_own(kind):
    module = getattr(torchecho.nn, kind)(I, H)
    module(torch.randn(T, B, I))[0].sum().backward()
    assert len({p.grad.data_ptr() for p in module.parameters()}) == len(list(module.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_and_double(kind):
    theirs, ours = pair(kind, I, H, 2, dtype=torch.bfloat16)
    x = torch.randn(T, B, I, dtype=torch.bfloat16)
    assert ours(x)[0].dtype == torch.bfloat16
    assert flat(ours(x))[-1].dtype == torch.bfloat16
    torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=2**-6, atol=2**-6)
    theirs, ours = pair(kind, I, H, 2, dtype=torch.float64)
    x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
    assert_same(theirs, ours, x, rtol=1e-9, atol=1e-10)
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        assert theirs(x)[0].dtype == ours(x)[0].dtype == torch.float64


def saved_bytes(module, x):
    """Return the bytes that autograd keeps for the backward, the output and what is kept anyway left out."""
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)[0]
    for known in (x, y, *module.parameters()):
        saved.pop(known.untyped_storage().data_ptr(), None)
    return sum(nbytes for nbytes, _ in saved.values())


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_stored_as_such(kind):
    module = getattr(torchecho.nn, kind)(64, 64, dtype=torch.bfloat16)
    many, few = (torch.randn(length, 16, 64, dtype=torch.bfloat16, requires_grad=True) for length in (512, 256))
    # lean: c before each chunk at most, in float32
    chunks = 256 // default_chunk_steps(16, 64) if kind == "LSTM" else 0
    assert saved_bytes(module, many) - saved_bytes(module, few) == chunks * 16 * 64 * 4


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_autocast_stores_bfloat16(kind):
    module = getattr(torchecho.nn, kind)(64, 64)
    many, few = (torch.randn(length, 16, 64, requires_grad=True) for length in (512, 256))
    with torch.autocast("cpu", torch.bfloat16):
        found = saved_bytes(module, many) - saved_bytes(module, few)
    chunks = 256 // default_chunk_steps(16, 64) if kind == "LSTM" else 0
    # besides, the converted input
    assert found == chunks * 16 * 64 * 4 + 256 * 16 * 64 * 2


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_returns_what_torch_does(kind):
    theirs, ours = pair(kind, I, H, 2)
    x = torch.randn(T, B, I, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = theirs(x)[0], ours(x)[0]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)
    found.sum().backward()
    assert ours.weight_hh_l0.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_pickle_and_functional_call(kind):
    _, ours = pair(kind, I, H, 2)
    x = torch.randn(T, B, I)
    assert torch.equal(pickle.loads(pickle.dumps(ours))(x)[0], ours(x)[0])
    zeros = {name: torch.zeros_like(p) for name, p in ours.named_parameters()}
    assert torch.func.functional_call(ours, zeros, (x,))[0].eq(0).all()


def test_repr_says_what_differs_from_the_defaults():
    made = torchecho.nn.LSTM(3, 5, 2, batch_first=True, stash="cell")
    assert repr(made) == "LSTM(3, 5, num_layers=2, batch_first=True, stash=cell)"


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_without_graph_breaks(kind):
    theirs, ours = pair(kind, I, H, 2, bidirectional=True)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_same(theirs, compiled, torch.randn(T, B, I, requires_grad=True))


BAD_MAKING = [
    {"dropout": 2.0},
    {"dropout": True},
    {"bias": 1},
    {"batch_first": "yes"},
    {"input_size": 2.0},
    {"input_size": 0},
    {"hidden_size": "3"},
    {"hidden_size": -1},
    {"num_layers": 0},
    {"proj_size": -1},
    {"proj_size": H},
    {"unknown": 1},
]


def error_of(make):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the type is what is compared
        make()
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", BAD_MAKING, ids=str)
def test_bad_arguments_raise_what_torch_raises(kind, bad):
    arguments = {"input_size": I, "hidden_size": H, **bad}
    expected = error_of(lambda: getattr(torch.nn, kind)(**arguments))
    assert isinstance(error_of(lambda: getattr(torchecho.nn, kind)(**arguments)), type(expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("x", "states"),
    [
        (torch.zeros(T, B, I + 1), None),
        (torch.zeros(T), None),
        (torch.zeros(0, B, I), None),
        (torch.zeros(T, B, I, dtype=torch.float64), None),
        (torch.zeros(T, B, I), (1, B + 1, H)),
        (torch.zeros(T, B, I), (2, B, H)),
        (torch.zeros(T, B, I), (1, H)),
        (torch.zeros(T, I), (1, 1, H)),
    ],
    ids=str,
)
def test_bad_input_raises_what_torch_raises(kind, x, states):
    theirs, ours = pair(kind, I, H)
    hx = None if states is None else torch.zeros(states)
    hx = (hx, hx) if hx is not None and kind == "LSTM" else hx
    expected = error_of(lambda: theirs(x, hx))
    assert isinstance(error_of(lambda: ours(x, hx)), type(expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.complex64], ids=str)
def test_states_of_another_type_raise_what_torch_raises(kind, dtype):
    theirs, ours = pair(kind, I, H)
    x, state = torch.zeros(T, B, I), torch.zeros(1, B, H, dtype=dtype)
    hx = (state, state) if kind == "LSTM" else state
    expected = error_of(lambda: theirs(x, hx))
    assert isinstance(error_of(lambda: ours(x, hx)), type(expected))


@pytest.mark.parametrize("hx", [torch.zeros(2, 1, B, H), (torch.zeros(1, B, H),) * 3], ids=["tensor", "three"])
def test_states_that_are_no_pair_raise_what_torch_raises(hx):
    theirs, ours = pair("LSTM", I, H)
    expected = error_of(lambda: theirs(torch.zeros(T, B, I), hx))
    assert isinstance(error_of(lambda: ours(torch.zeros(T, B, I), hx)), type(expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0"])
def test_weights_of_another_shape_are_named(kind, name):
    """The kernels would read beyond them."""
    _, ours = pair(kind, I, H)
    smaller = torch.nn.Parameter(getattr(ours, name).detach()[:-1].clone())
    setattr(ours, name, smaller)
    with pytest.raises(RuntimeError, match=f"{name} must have the shape"):
        ours(torch.zeros(T, B, I))


def test_peepholes_of_another_shape_are_named():
    ours = torchecho.nn.VariantLSTM(I, H, peephole=True)
    ours.peephole_l0 = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError, match="peephole_l0 must have the shape"):
        ours(torch.zeros(T, B, I))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "sizes"), [(4, (3, 2, 1)), (9, (3, 2, 1)), (6, (1, 2, 3)), (6, (4, 3, -1))])
def test_sizes_that_do_not_fit_the_rows_are_named(kind, rows, sizes):
    """The kernels would write beyond them."""
    _, ours = pair(kind, I, H, bidirectional=True)
    with pytest.raises(RuntimeError, match="batch_sizes"):
        ours(PackedSequence(torch.zeros(rows, I), torch.tensor(sizes)))


@pytest.mark.parametrize("stash", torchecho.nn.GRU.modes())
def test_bias_that_is_a_column_of_a_matrix(stash):
    module, x = torchecho.nn.GRU(I, H, stash=stash), torch.randn(T, B, I)
    columns = torch.randn(3 * H, 2, requires_grad=True)

    def gradient(bias):
        made = torch.func.functional_call(module, {"bias_hh_l0": bias}, (x,))[0]
        return torch.autograd.grad(made.square().sum(), columns)[0]

    assert torch.equal(gradient(columns[:, 0]), gradient(columns[:, 0].contiguous()))


def test_gradients_behind_what_is_no_number_are_torchs():
    theirs, ours = pair("RNN", I, H, nonlinearity="relu")
    x, h0 = torch.randn(T, B, I), torch.zeros(1, B, H)
    h0[0, 0, 0] = float("nan")
    grads = [torch.autograd.grad(module(x, h0)[0].sum(), list(module.parameters())) for module in (theirs, ours)]
    torch.testing.assert_close(grads[1], grads[0], equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_without_data(kind):
    module = getattr(torchecho.nn, kind)(I, H, device="meta")
    assert module(torch.zeros(T, B, I, device="meta"))[0].shape == (T, B, H)


@pytest.mark.parametrize(
    ("kind", "stash"), [("LSTM", "gates"), ("LSTM", "lean"), ("GRU", "gates"), ("GRU", "lean"), ("RNN", "auto")]
)
def test_one_graph_serves_all_batches(kind, stash):
    theirs, ours = pair(kind, I, H, stash=stash)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, dynamic=True)
    for batch in range(3, 7):
        assert_same(theirs, compiled, torch.randn(T, batch, I, requires_grad=True))
    assert counter.frame_count == 1


def test_unknown_stash_modes_and_nonlinearities_are_named():
    with pytest.raises(ValueError, match="auto, gates, lean"):
        torchecho.nn.GRU(I, H, stash="cell")
    with pytest.raises(ValueError, match="sigmoid"):
        torchecho.nn.RNN(I, H, nonlinearity="sigmoid")
    with pytest.warns(UserWarning, match="one layer"):
        torchecho.nn.LSTM(I, H, dropout=0.5)
