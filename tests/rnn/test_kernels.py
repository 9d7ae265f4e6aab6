"""The C++ kernels against torch.nn in double precision, against each other, and against what they must not touch."""

from types import SimpleNamespace

import pytest
import torch

from tests.rnn.layers import EVERY, MODES, ONE_ULP, asked_for, case, relative_errors, runnable, weights_like
from torchecho.rnn import backends, gemm, library

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

DTYPES = pytest.mark.parametrize("dtype", ONE_ULP, ids=str)
SHAPES = {
    "H=1": {"T": 5, "B": 3, "I": 2, "H": 1},
    "H=7": {"T": 9, "B": 4, "I": 3, "H": 7, "directions": 2},
    "H=200": {"T": 30, "B": 20, "I": 33, "H": 200},
    "H=650": {"T": 4, "B": 5, "I": 17, "H": 650},
    "T=1": {"T": 1, "B": 3, "I": 5, "H": 17},
    "T=5000": {"T": 5000, "B": 1, "I": 3, "H": 8},
    "B=130": {"T": 6, "B": 130, "I": 5, "H": 20},
    "packed": {"T": 12, "B": 6, "I": 5, "H": 19, "directions": 2, "lengths": (12, 12, 9, 4, 1, 1)},
    "no bias": {"T": 6, "B": 3, "I": 5, "H": 19, "directions": 2, "bias": False},
}


@pytest.fixture(params=library.VARIANTS)
def variant(request):
    if not runnable(request.param):
        pytest.skip(f"this processor runs no {request.param}")
    with asked_for(request.param):
        assert library.library() is not None
        yield request.param


def assert_error_at_most_three_times_that_of_torch(layer, mode):
    """Compare outputs and all gradients with torch.nn's, both with torch.nn in double precision."""
    weights = weights_like(layer.run(mode))
    exact = layer.to(torch.float64).by_torch(mode, [w.double() for w in weights])
    ours = relative_errors(layer.gradients(mode, weights), exact)
    theirs = relative_errors(layer.by_torch(mode, weights), exact)
    allowed = [3 * max(error, ONE_ULP[layer.x.dtype]) for error in theirs]
    assert all(o <= a for o, a in zip(ours, allowed, strict=True)), list(zip(ours, theirs, strict=True))


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_error_against_double_is_at_most_three_times_that_of_torch(family, mode, shape, dtype):
    assert_error_at_most_three_times_that_of_torch(case(family, **SHAPES[shape], dtype=dtype), mode)


@pytest.mark.parametrize("way", ["kernels", "blas"])
@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_error_whichever_way_is_the_fastest(family, mode, way, monkeypatch):
    monkeypatch.setattr(backends, "choose", lambda shape, out, ways, operands: ways[way])
    assert_error_at_most_three_times_that_of_torch(case(family, **SHAPES["H=200"]), mode)


@DTYPES
@pytest.mark.parametrize("mode", MODES["lstm"])
def test_error_with_projection(mode, dtype):
    sizes = {"T": 20, "B": 9, "I": 11, "H": 50, "projection": 13, "directions": 2}
    layer = case("lstm", **sizes, lengths=(20, 20, 18, 11, 5, 4, 4, 2, 1), dtype=dtype)
    assert_error_at_most_three_times_that_of_torch(layer, mode)


@DTYPES
@pytest.mark.parametrize(("family", "mode"), EVERY)
@pytest.mark.parametrize("shape", ["H=7", "H=200", "packed"])
def test_every_variant_agrees_with_the_reference(variant, family, mode, shape, dtype):
    assert_error_at_most_three_times_that_of_torch(case(family, **SHAPES[shape], dtype=dtype), mode)


@pytest.mark.parametrize(("speed", "variant"), [(0.8, "avx512"), (2.0, "avx512bf16")])
def test_pairs_are_multiplied_only_where_they_are_faster(speed, variant, monkeypatch):
    probe = SimpleNamespace(torchecho_pairs_speed=lambda: speed)
    monkeypatch.setattr(library, "load_library", lambda *_: probe)
    monkeypatch.setattr(library, "widest_variant", lambda: "avx512bf16")
    assert library.best_variant.__wrapped__() == variant


@pytest.mark.skipif(not runnable("avx512bf16"), reason="this processor multiplies no pairs of bfloat16")
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("layout", ["rows", "columns", "apart"])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 1, 1), (7, 33, 17), (97, 300, 70), (20, 2100, 130)])
def test_a_product_of_pairs_is_that_of_rounded_operands(rows, depth, columns, layout, is_packed):
    left = {
        "rows": torch.randn(rows, depth),
        "columns": torch.randn(depth, rows).t(),
        "apart": torch.randn(rows, depth, 2)[..., 0],
    }[layout]
    weight, there = torch.randn(depth, columns), torch.randn(rows, columns)
    out = there.clone()
    with asked_for("avx512bf16"):
        right = gemm.pack(weight.t(), pairs=True) if is_packed else gemm.right(weight, pairs=True)
        gemm.product(out, left, right, accumulate=True)
    rounded, factor = left.bfloat16().double(), weight.bfloat16().double()
    exact, size = there + rounded @ factor, there.abs() + rounded.abs() @ factor.abs()
    # products are exact in float32, and so many sums round: Higham, Accuracy and Stability, section 3.1
    assert ((out - exact).abs() <= (depth + 2) * 2.0**-24 * 1.01 * size).all()


@DTYPES
@pytest.mark.parametrize(("family", "mode"), EVERY)
@pytest.mark.parametrize("shape", ["H=7", "packed", "B=130", "T=5000"])
def test_nothing_unwritten_is_read(family, mode, shape, dtype, monkeypatch):
    layer = case(family, **SHAPES[shape], dtype=dtype)
    weights = weights_like(layer.run(mode))
    expected = layer.gradients(mode, weights)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    assert all(torch.equal(a, b) for a, b in zip(layer.gradients(mode, weights), expected, strict=True))


@DTYPES
@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_the_number_of_threads_changes_nothing(family, mode, dtype):
    layer = case(family, T=9, B=70, I=20, H=90, directions=2, dtype=dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(layer.run(mode))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@DTYPES
@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_nan_and_infinite_inputs_reach_the_output(family, mode, dtype):
    layer = case(family, T=3, B=2, I=4, H=20, dtype=dtype)
    with torch.no_grad():
        layer.x[1, 0, 0] = float("nan")
        y = layer.run(mode)[0]
        assert y[0].isfinite().all()
        assert y[1:, 0].isnan().all()
        assert y[:, 1].isfinite().all()
        layer.x[1, 0, 0] = float("inf")
        expected = layer.to(torch.float64).run(mode)[0]
        # h is at most 1 and rounded at each of three steps, or in float32 computed from a few dozen terms
        rtol, atol = (2.0**-6, 2.0**-6) if dtype == torch.bfloat16 else (1e-5, 1e-6)
        torch.testing.assert_close(layer.run(mode)[0].double(), expected, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("family", ["lstm", "gru", "elman"])
def test_tiny_inputs_keep_their_relative_accuracy(family):
    mode = MODES[family][0]
    layer = case(family, T=1, B=4, I=8, H=40, bias=False)
    with torch.no_grad():
        for tensor in (layer.x, *layer.states):
            tensor.mul_(1e-6)
        found, exact = layer.run(mode)[0], layer.to(torch.float64).run(mode)[0]
    assert max(relative_errors([found], [exact])) < 1e-6


def test_an_unknown_variant_is_refused():
    with asked_for("avx1024"), pytest.raises(ValueError, match="avx512, avx2, portable, naive"):
        library.library()


def test_without_a_compiler_the_reference_runs_with_one_note(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    library._library.cache_clear()
    try:
        layer = case("lstm", T=3, B=2, I=4, H=5)
        weights = weights_like(layer.run("lean"))
        found = layer.gradients("lean", weights)
        expected = layer.to(torch.float64).gradients("lean", [w.double() for w in weights])
        assert max(relative_errors(found, expected)) < 1e-5
    finally:
        library._library.cache_clear()
    assert [r.getMessage().count("no-compiler") for r in caplog.records] == [1]


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["lstm", "gru"])
def test_every_mode_gives_the_same_bits(family, shape, variant, dtype):
    layer = case(family, **SHAPES[shape], dtype=dtype)
    weights = weights_like(layer.run("lean"))
    first, *others = [layer.gradients(mode, weights) for mode in MODES[family]]
    for mode, other in zip(MODES[family][1:], others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), mode


@DTYPES
def test_every_mode_gives_the_same_bits_with_projection(variant, dtype):
    layer = case("lstm", T=20, B=9, I=11, H=50, projection=13, directions=2, dtype=dtype)
    weights = weights_like(layer.run("lean"))
    first, *others = [layer.gradients(mode, weights) for mode in MODES["lstm"]]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@DTYPES
@pytest.mark.parametrize("family", ["lstm", "gru"])
def test_every_mode_gives_the_same_bits_where_products_are_large_enough_to_be_chosen(family, dtype):
    layer = case(family, T=40, B=32, I=256, H=200, dtype=dtype)
    weights = weights_like(layer.run("lean"))
    first, *others = [layer.gradients(mode, weights) for mode in MODES[family]]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
