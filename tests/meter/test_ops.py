import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchecho.meter.ops import _profiled_workspace_bytes, _real_arguments, measure_op

aten = torch.ops.aten


def fake(make):
    with FakeTensorMode():
        return make()


def test_workspace_is_what_is_allocated_and_freed_inside():
    def op(x):
        scratch = x + x  # as large as the input, freed at the return
        return scratch.sum(0)

    x = fake(lambda: torch.empty(64, 32))
    # The output is made while the scratch is alive; nothing else is.
    assert measure_op(op, (x,), {})[1] == 64 * 32 * 4


def test_workspace_freed_before_the_output_is_hidden_behind_it():
    def op(x):
        torch.empty(16)
        return torch.empty_like(x)

    assert measure_op(op, (torch.ones(100),), {})[1] == 0


CONVOLUTION = ((2, 8, 16, 16), (8, 8, 3, 3)), (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


@pytest.mark.parametrize(
    ("target", "shapes", "rest"),
    [
        (aten.sort.default, ((64, 100),), ()),
        (aten.convolution.default, *CONVOLUTION),
        (aten.add.Tensor, ((10,),), (1,)),
        (aten.mm.default, ((8, 16), (16, 8)), ()),
    ],
    ids=["sort", "convolution", "add", "mm"],
)
def test_workspace_agrees_with_the_profiler(target, shapes, rest):
    arguments = (*map(torch.empty, shapes), *rest)
    measured = measure_op(target, arguments, {})
    real, _ = _real_arguments(arguments, {})
    with torch.no_grad():
        assert measured[1] == _profiled_workspace_bytes(lambda: target(*real))
    assert measured[0] > 0


def test_views_are_not_run():
    w = fake(lambda: torch.empty(4, 8))
    assert measure_op(aten.t.default, (w,), {}) == (0.0, 0)
    assert measure_op(aten.split.Tensor, (w, 2), {}) == (0.0, 0)


def test_arguments_become_real_and_look_the_same():
    def make():
        strided = torch.empty(6, 4).t()[1:]
        return [strided, torch.empty(1, 5).expand(3, 5)], torch.empty(2, dtype=torch.int64), torch.empty(2) > 0, None, 3

    arguments = fake(make)
    (floats, integers, booleans, nothing, number), _ = _real_arguments(arguments, {})
    for real, example in zip(floats, arguments[0], strict=True):
        assert (real.shape, real.stride(), real.dtype) == (example.shape, example.stride(), example.dtype)
        assert ((real >= 0) & (real < 1)).all()
    assert floats[1].untyped_storage().nbytes() == 5 * 4
    assert integers.tolist() == [0, 0]
    assert booleans.tolist() == [False, False]
    assert (nothing, number) == (None, 3)


def test_one_tensor_twice_is_made_once():
    x = fake(lambda: torch.empty(10))
    (left, right), kwargs = _real_arguments((x, x), {"other": x})
    assert left.data_ptr() == right.data_ptr() == kwargs["other"].data_ptr()


def test_large_tensor_is_filled_to_the_end():
    ((x,), _) = _real_arguments((fake(lambda: torch.empty(3, 50_000)),), {})
    assert x.max() < 1
    assert (x.flatten()[-100:] > 0).any()


def test_random_numbers_go_on_as_if_nothing_had_run():
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    assert measure_op(aten.bernoulli.p, (torch.empty(100), 0.5), {}) is not None
    assert torch.equal(torch.rand(4), expected)


def test_op_runs_as_in_a_forward_whatever_is_around():
    seen = []

    def op(x):
        made = x * 2
        seen.append((torch.is_grad_enabled(), made.requires_grad, torch.is_autocast_enabled("cpu"), type(x)))
        return made

    with FakeTensorMode(), torch.autocast("cpu"), torch.no_grad():
        x = torch.empty(10, requires_grad=True)
        assert measure_op(op, (x,), {}) is not None
    assert set(seen) == {(True, False, False, torch.Tensor)}


def test_recurrent_layer_makes_the_workspace_of_its_backward():
    T, B, H = 5, 3, 4
    x, state = torch.randn(T, B, H), torch.zeros(B, H)
    weights = [torch.randn(4 * H, H), torch.randn(4 * H, H), torch.randn(4 * H), torch.randn(4 * H)]
    made = []

    def layer(*args):
        made.append(aten.mkldnn_rnn_layer.default(*args, False, [], 2, H, 1, True, False, False, True))
        return made[-1]

    assert measure_op(layer, (x, *weights, state, state), {}) is not None
    assert made[0][3].numel() > 0


def test_conjugate_views_are_made_in_memory_of_their_own() -> None:
    x = torch.zeros(1000, dtype=torch.complex64)
    plain, conjugate = measure_op(aten.mul.Tensor, (x, x), {}), measure_op(aten.mul.Tensor, (x, x.conj()), {})
    assert (plain[1], conjugate[1]) == (0, x.nbytes)


def test_op_that_cannot_run_alone_is_none():
    assert measure_op(aten.mm.default, (torch.empty(2, 3), torch.empty(2, 3)), {}) is None
    assert measure_op(aten.relu.default, (torch.eye(3).to_sparse(),), {}) is None


def test_ops_of_other_libraries_are_never_run():
    runs = []
    with torch.library._scoped_library("torchecho_tests", "FRAGMENT") as library:
        library.define("effect(Tensor x) -> Tensor")
        library.impl("effect", lambda x: runs.append(1) or x.clone(), "CPU")
        assert measure_op(torch.ops.torchecho_tests.effect.default, (torch.empty(3),), {}) is None
    assert runs == []


def test_higher_order_ops_are_never_run():
    assert measure_op(torch.ops.higher_order.cond, (True, lambda: 1, lambda: 2, ()), {}) is None


def test_symbolic_sizes_use_the_example():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(6, 4))
    ((real, number), _) = _real_arguments((x, x.shape[0]), {})
    assert (tuple(real.shape), real.stride(), number) == ((6, 4), (4, 1), 6)
