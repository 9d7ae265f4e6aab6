"""The Triton kernels: in Triton's interpreter against the reference, and compiled ahead of time for two GPUs."""

import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.rnn.layers import EVERY, MODES, asked_for, case, relative_errors, weights_like
from tests.rnn.test_ops import saved_bytes
from torchecho.rnn import dispatch
from torchecho.rnn.cuda import graphs
from torchecho.rnn.gru import stash as gru_stash
from torchecho.rnn.lstm import stash as lstm_stash
from torchecho.rnn.sequence import default_chunk_steps

pytest.importorskip("triton")
# NumPy, in which the interpreter computes, warns of exp(x) = inf, which is meant, and of how Triton reads loop bounds.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
interprets_loops = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="Triton 3.6's interpreter cannot bound a loop with NumPy 2.4"
)

ONE_ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SHAPES = {
    "H=1": {"T": 3, "B": 3, "I": 2, "H": 1},
    "H=7": {"T": 9, "B": 4, "I": 3, "H": 7, "directions": 2},
    "H=130": {"T": 3, "B": 5, "I": 9, "H": 130},
    "B=40": {"T": 2, "B": 40, "I": 5, "H": 16},
    "T=1": {"T": 1, "B": 3, "I": 5, "H": 17},
    "packed": {"T": 12, "B": 6, "I": 5, "H": 19, "directions": 2, "lengths": (12, 12, 9, 4, 1, 1)},
    "no bias": {"T": 4, "B": 3, "I": 5, "H": 19, "directions": 2, "bias": False},
}
TINY = {"T": 2, "B": 2, "I": 3, "H": 5}
_KERNELS = ("cuda.maths", *(f"{family}.{name}" for family in MODES for name in ("triton_kernels", "gpu")))
_KERNELS += ("lstm.triton_sequence", "lstm.single")


def forget_kernels():
    """Drop the modules of kernels, which are made for the interpreter or the compiler when they are imported."""
    for name in _KERNELS:
        package, _, module = f"torchecho.rnn.{name}".rpartition(".")
        if sys.modules.pop(f"{package}.{module}", None):
            delattr(importlib.import_module(package), module)


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    with pytest.MonkeyPatch.context() as patch, asked_for("triton"):
        patch.setenv("TRITON_INTERPRET", "1")
        forget_kernels()
        yield
        forget_kernels()


@pytest.fixture(params=["step by step", pytest.param("in one launch", marks=interprets_loops)])
def launches(request, monkeypatch):
    """Run LSTMs either way, whatever their type; yield which."""
    single = importlib.import_module("torchecho.rnn.lstm.single")
    monkeypatch.setattr(single, "takes", lambda _direction: request.param == "in one launch")
    return request.param


@pytest.fixture
def step_by_step(monkeypatch):
    monkeypatch.setattr(importlib.import_module("torchecho.rnn.lstm.single"), "takes", lambda _direction: False)


def by_reference(layer, mode, weights):
    """Return the gradients by plain PyTorch in the layer's own type."""
    with asked_for("naive"):
        return layer.gradients(mode, weights)


def errors(layer, mode, run):
    """Return the errors of `run` against the reference in double precision, at the same rounded numbers."""
    torch.manual_seed(1)
    weights = weights_like(layer.run(mode))
    exact = layer.to(torch.float64).gradients(mode, [w.double() for w in weights])
    return relative_errors(run(layer, mode, weights), exact)


@interprets_loops
@pytest.mark.parametrize("mode", MODES["lstm"])
@pytest.mark.parametrize("shape", ["H=1", "B=40", "packed"])
def test_one_launch_agrees_with_the_reference(mode, shape, monkeypatch):
    single, ran = importlib.import_module("torchecho.rnn.lstm.single"), []
    for name in ("forward_chunk", "backward_chunk"):
        launch = getattr(single, name)
        monkeypatch.setattr(single, name, lambda *a, launch=launch, name=name: ran.append(name) or launch(*a))
    monkeypatch.setattr(single, "takes", lambda _direction: True)
    assert max(errors(case("lstm", **SHAPES[shape]), mode, by_kernels)) < 1e-5
    assert set(ran) == {"forward_chunk", "backward_chunk"}


@interprets_loops
@pytest.mark.parametrize("mode", MODES["lstm"])
def test_float16_in_one_launch(mode):
    layer = case("lstm", **SHAPES["packed"]).to(torch.float16)
    ours, theirs = errors(layer, mode, by_kernels), errors(layer, mode, by_reference)
    assert all(o <= 3 * max(t, ONE_ULP[torch.float16]) for o, t in zip(ours, theirs, strict=True))


def test_which_layers_take_one_launch():
    single = importlib.import_module("torchecho.rnn.lstm.single")

    def takes(dtype, H, projection=None):
        x, c0 = torch.empty(1, 1, 1, dtype=dtype), torch.empty(1, H)
        return single.takes(SimpleNamespace(x=x, c0=c0, units=H, weights=SimpleNamespace(projection=projection)))

    assert takes(torch.float16, 128)
    assert not takes(torch.float16, 129)
    assert not takes(torch.float32, 8)
    assert not takes(torch.float16, 8, torch.empty(4, 8))


def by_kernels(layer, mode, weights):
    assert dispatch.kernels_for(layer.family, layer.leaves).__name__ == f"torchecho.rnn.{layer.family}.gpu"
    return layer.gradients(mode, weights)


@pytest.mark.parametrize("shape", ["H=7", "H=130", "packed"])
@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_float32_agrees_with_the_reference(family, mode, shape):
    assert max(errors(case(family, **SHAPES[shape]), mode, by_kernels)) < 1e-5


@pytest.mark.parametrize("shape", ["H=1", "B=40", "T=1", "no bias"])
@pytest.mark.parametrize(("family", "mode"), [("lstm", "lean"), ("gru", "lean"), ("elman", "tanh")])
def test_float32_at_the_edges_agrees_with_the_reference(family, mode, shape):
    assert max(errors(case(family, **SHAPES[shape]), mode, by_kernels)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_half_types_err_at_most_three_times_as_much_as_plain_pytorch(family, mode, dtype, step_by_step):
    layer = case(family, **SHAPES["packed"]).to(dtype)
    ours, theirs = errors(layer, mode, by_kernels), errors(layer, mode, by_reference)
    allowed = [3 * max(error, ONE_ULP[dtype]) for error in theirs]
    if mode == "relu":
        # Rounding moves sums across the kink, where gradients jump; float32 is what checks them.
        ours, theirs = ours[:2], theirs[:2]
        allowed = allowed[:2]
    assert all(o <= a for o, a in zip(ours, allowed, strict=True)), list(zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES["lstm"])
def test_projection(mode, dtype):
    layer = case("lstm", T=6, B=4, I=5, H=19, projection=6, directions=2, lengths=(6, 5, 2, 1)).to(dtype)
    ours, theirs = errors(layer, mode, by_kernels), errors(layer, mode, by_reference)
    assert all(o <= 3 * max(t, ONE_ULP[dtype]) for o, t in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", ["lstm", "gru"])
def test_modes_have_the_same_outputs(family, launches):
    layer = case(family, **SHAPES["packed"])
    first, *others = ([t.detach() for t in layer.run(mode)] for mode in MODES[family])
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_nothing_unwritten_is_read(family, mode, launches, monkeypatch):
    if launches == "in one launch" and family != "lstm":
        pytest.skip("only an LSTM has kernels of all steps")
    layer = case(family, T=4, B=3, I=5, H=19, directions=2, lengths=(4, 3, 1))
    weights = weights_like(layer.run(mode))
    expected = layer.gradients(mode, weights)
    empty = torch.Tensor.new_empty

    def filled(*args, **options):
        tensor = empty(*args, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    assert all(torch.equal(a, b) for a, b in zip(layer.gradients(mode, weights), expected, strict=True))


@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_chunks_of_any_length_give_the_same_results(family, mode):
    layer = case(family, T=7, B=3, I=4, H=9, directions=2, lengths=(7, 4, 2))
    op = getattr(torch.ops.torchecho, family)
    results = []
    for chunk_steps in (1, 3, 7):
        arguments = (layer.x, layer.batch_sizes, *layer.states, layer.weights, mode, chunk_steps)
        outputs = op(*arguments)[: 1 + len(layer.states)]
        torch.manual_seed(1)
        results.append([*outputs, *torch.autograd.grad(outputs, layer.leaves, weights_like(outputs))])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_gradients_that_are_views_and_backward_twice(family, mode):
    layer = case(family, T=4, B=3, I=4, H=9)
    y = layer.run(mode)[0]
    first = torch.autograd.grad(y.sum(), layer.leaves, retain_graph=True)
    again = torch.autograd.grad(y.sum(), layer.leaves)
    expected = by_reference(layer, mode, [torch.ones_like(y), *(torch.zeros_like(s) for s in layer.states)])
    for a, b, exact in zip(first, again, expected[1 + len(layer.states) :], strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_stashes_what_it_says(family, mode, dtype):
    T, B, H = 7, 64, 10
    sizes = {"T": T, "B": B, "H": H, "chunk_steps": default_chunk_steps(B, H), "itemsize": dtype.itemsize}
    said = {"lstm": lstm_stash.stash_bytes, "gru": gru_stash.stash_bytes}.get(family, lambda *_, **__: 0)
    assert saved_bytes(case(family, T=T, B=B, I=3, H=H).to(dtype), mode) == said(mode, **sizes)


@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_nan_and_infinite_inputs_reach_the_output(family, mode):
    layer = case(family, T=3, B=2, I=4, H=20)
    with torch.no_grad():
        layer.x[1, 0, 0] = float("nan")
        y = layer.run(mode)[0]
        assert y[0].isfinite().all()
        assert y[1:, 0].isnan().all()
        assert y[:, 1].isfinite().all()
        layer.x[1, 0, 0] = float("inf")
        expected = layer.to(torch.float64).run(mode)[0]
        torch.testing.assert_close(layer.run(mode)[0].double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("family", list(MODES))
def test_tiny_inputs_keep_their_relative_accuracy(family):
    layer = case(family, T=1, B=4, I=8, H=40, bias=False)
    with torch.no_grad():
        for tensor in (layer.x, *layer.states):
            tensor.mul_(1e-6)
        found, exact = layer.run(MODES[family][0])[0], layer.to(torch.float64).run(MODES[family][0])[0]
    assert max(relative_errors([found], [exact])) < 1e-6


@pytest.fixture
def recorded_graphs(monkeypatch):
    """Stand in for CUDA graphs: what is captured is run again, on memory of its own, filled with NaN before."""
    captures = []

    def capture(body, tensors):
        own = {
            key: None if t is None else torch.full(t.shape, float("nan"), dtype=t.dtype) for key, t in tensors.items()
        }
        captures.append(own)
        return graphs._Captured(SimpleNamespace(replay=lambda: body(own)), own)

    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(graphs, "_can_capture", lambda _tensors: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=0))
    graphs.clear()
    yield captures
    graphs.clear()


@pytest.mark.parametrize(
    "shape", [{**TINY, "directions": 2}, {**TINY, "projection": 4}], ids=["both directions", "projection"]
)
@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_a_graph_gives_what_its_loop_gives(family, mode, shape, recorded_graphs):
    if "projection" in shape and family != "lstm":
        pytest.skip("only an LSTM has a projection")
    layer = case(family, **shape)
    weights = weights_like(layer.run(mode))
    graphs.clear()
    results = [layer.gradients(mode, weights) for _ in range(4)]
    assert recorded_graphs
    for other in results[1:]:
        # Not bit by bit: how a BLAS rounds may depend on where in memory its operands are.
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(b, a)


def test_graphs_are_few_and_made_only_for_sizes_that_come_again(recorded_graphs):
    for H in range(1, 41):
        layer = case("elman", T=2, B=2, I=2, H=H)
        with torch.no_grad():
            layer.run("tanh")
            layer.run("tanh")
            assert len(recorded_graphs) == H - 1
            layer.run("tanh")
        assert len(recorded_graphs) == H
    assert len(graphs._captured) == graphs._MOST_GRAPHS


#: Kernels of a step: 64 registers let an SM hold 1024 threads of two elements each, whose loads (36 bytes an element
#: for an LSTM) keep more in flight than the SM's share of the memory's bandwidth times its latency.
MOST_STEP_REGISTERS = 64
#: Kernels of all steps: one program of 256 threads an SM, whose 65,536 registers give each at most 255, the limit of a
#: thread; 240 leaves the assembler some way to go before it spills. Shared memory is that of a program on an A100.
MOST_SEQUENCE_REGISTERS, MOST_SHARED_BYTES = 240, 163 * 1024


def test_compiles_for_two_gpus_without_spills_within_the_registers(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "bench.rnn_kernels", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["capability"] for row in rows} == {80, 90}
    assert {row["kernel"].split(".")[0] for row in rows} == set(MODES)
    for row in rows:
        assert row["spill_bytes"] == 0, row
        whole = row["kernel"].endswith("_sequence")
        assert row["registers"] <= (MOST_SEQUENCE_REGISTERS if whole else MOST_STEP_REGISTERS), row
        assert row["shared_bytes"] <= MOST_SHARED_BYTES, row
