"""Every kind of op that may not run twice is known, with its reason; the rest may."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torchecho.nn  # noqa: F401 - registers the operators
from tests.capture.joint import capture
from tests.end_to_end.models import ChangingBuffer
from torchecho.capture.fx import JointCapture
from torchecho.capture.rules import keep_reason, keep_reason_of_call

aten = torch.ops.aten
RANDOM = "draws random numbers"
CHOICE = "makes a discontinuous choice"
CHANGED = "reads an input that the forward changes in place"


def node_of(target: Any, *args: Any, value: Tensor | None = None, **kwargs: Any) -> fx.Node:
    """Return a node that calls `target`, with fake tensors where the arguments are tensors."""
    mode, graph = FakeTensorMode(), fx.Graph()
    fakes = [graph.placeholder("x") if isinstance(a, Tensor) else a for a in args]
    node = graph.call_function(target, tuple(fakes), kwargs)
    node.meta["val"] = mode.from_tensor(torch.zeros(4) if value is None else value)
    return node


def reasons(captured: JointCapture) -> dict[str, str]:
    """Return the reason of each forward op that has one, by what it calls."""
    return {op.target.split(".")[1]: op.keep_reason for op in captured.graph.ops if op.keep_reason}


X = torch.zeros(4, 4)
RANDOM_CALLS = {
    "dropout": (aten.native_dropout.default, X, 0.5, True),
    "dropout's mask": (aten.bernoulli.p, X, 0.5),
    "rrelu": (aten.rrelu_with_noise_functional.default, X, X, 0.1, 0.3, True),
    "randn": (aten.randn.default, [4]),
    "rand_like": (aten.rand_like.default, X),
    "uniform noise": (aten.uniform.default, X),
    "multinomial": (aten.multinomial.default, X, 2),
}


@pytest.mark.parametrize("name", RANDOM_CALLS)
def test_random_draws_are_kept(name: str) -> None:
    assert keep_reason(node_of(*RANDOM_CALLS[name])) == RANDOM


@pytest.mark.parametrize(
    ("target", "place"),
    [
        (aten._scaled_dot_product_flash_attention_for_cpu.default, 3),
        (aten._scaled_dot_product_flash_attention.default, 3),
        (aten._scaled_dot_product_efficient_attention.default, 5),
        (aten._scaled_dot_product_cudnn_attention.default, 5),
    ],
)
def test_attention_draws_only_with_dropout(target: Any, place: int) -> None:
    rest = [None, True][: place - 3]  # attention bias, and whether to return the log of the sums
    assert keep_reason(node_of(target, X, X, X, *rest)) == ""
    assert keep_reason(node_of(target, X, X, X, *rest, 0.0)) == ""
    assert keep_reason(node_of(target, X, X, X, *rest, dropout_p=0.0)) == ""
    assert keep_reason(node_of(target, X, X, X, *rest, 0.1)) == RANDOM
    assert keep_reason(node_of(target, X, X, X, *rest, dropout_p=0.1)) == RANDOM


@pytest.mark.parametrize(
    "call",
    [
        (aten.topk.default, X, 2),
        (aten.sort.default, X),
        (aten.sort.stable, X),
        (aten.argmax.default, X),
        (aten.argmin.default, X),
        (aten.kthvalue.default, X, 2),
        (aten.bucketize.Tensor, X, X),
        (aten.searchsorted.Tensor, X, X),
    ],
)
def test_discontinuous_choices_are_kept(call: tuple[Any, ...]) -> None:
    assert keep_reason(node_of(*call)) == CHOICE


@pytest.mark.parametrize("call", [(aten.nonzero.default, X), (aten._local_scalar_dense.default, X)])
def test_what_depends_on_values_is_kept(call: tuple[Any, ...]) -> None:
    assert keep_reason(node_of(*call)) == "output depends on values"


@pytest.mark.parametrize("call", [(aten.add_.Tensor, X, X), (aten.copy_.default, X, X), (aten.mul.out, X, X)])
def test_what_changes_its_arguments_is_kept(call: tuple[Any, ...]) -> None:
    assert keep_reason(node_of(*call)) == "changes its arguments"


@pytest.mark.parametrize("call", [(aten.scatter_add.default, X, 0, X, X), (aten.index_add.default, X, 0, X, X)])
def test_atomic_sums_are_kept_on_cuda_only(call: tuple[Any, ...]) -> None:
    node = node_of(*call)
    assert keep_reason(node) == ""
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(4, device="cuda") if torch.cuda.is_available() else _fake_cuda()
    assert keep_reason(node) == "sums in an order that varies on CUDA"


def _fake_cuda() -> Tensor:
    return torch._subclasses.FakeTensor(FakeTensorMode(), torch.empty(4, device="meta"), torch.device("cuda:0"))


@pytest.mark.parametrize(
    "call",
    [
        (aten.mm.default, X, X),
        (aten.tanh.default, X),
        (aten.native_layer_norm.default, X, [4], X, X, 1e-5),
        (aten.cat.default, [X]),
    ],
)
def test_pure_functions_may_run_twice(call: tuple[Any, ...]) -> None:
    assert keep_reason(node_of(*call)) == ""


@pytest.mark.parametrize("name", ["lstm", "gru", "elman", "lstm_variant"])
def test_recurrent_layers_may_run_twice(name: str) -> None:
    target = getattr(torch.ops.torchecho, name).default
    assert keep_reason_of_call(target, (), {}, on_cuda=False) == ""


def test_what_is_no_operator_is_kept() -> None:
    assert keep_reason(node_of(torch.ops.higher_order.cond, X)) == "not a plain operator"
    assert keep_reason(node_of(torch.sin, X)) == "not a plain operator"


def test_custom_operators_are_kept_by_name() -> None:
    @torch.library.custom_op("torchecho_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda _, gradient: gradient * 2)
    captured = capture(lambda x: torch.tanh(twice(x)).sum(), torch.randn(4, requires_grad=True))
    assert reasons(captured) == {"twice": "custom operator torchecho_tests::twice: not known to be repeatable"}


# Dynamo warns of every checkpoint that has a policy: that the region must not change values in place.
@pytest.mark.filterwarnings("ignore")
def test_what_a_checkpoint_policy_must_save_is_kept() -> None:
    def policy(_: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if target is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def model(x: Tensor, w: Tensor) -> Tensor:
        made = checkpoint(lambda y: torch.tanh(y @ w).sin(), x, use_reentrant=False, context_fn=contexts)
        assert isinstance(made, Tensor)
        return made.sum()

    captured = capture(model, torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True))
    assert reasons(captured) == {"mm": "marked MUST_SAVE"}


def test_what_reads_a_buffer_that_changes_is_kept() -> None:
    captured = capture(ChangingBuffer(), torch.randn(16, 16))
    # sin(count) and count + 1 read what copy_ writes at the end; the product of x and the weight does not
    assert reasons(captured) == {"sin": CHANGED, "add": CHANGED, "copy_": "changes its arguments"}
    assert not any(op.keep_reason for op in captured.graph.ops if ".mm." in op.target)


def test_what_reads_a_view_of_a_buffer_that_changes_is_kept() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = (x.exp() * torch.cos(self.state.t()[1:2])).sum()
            self.state.mul_(0.5)
            return y

    captured = capture(Rows(), torch.randn(4, 4, requires_grad=True))
    assert reasons(captured)["cos"] == CHANGED
    assert "exp" not in reasons(captured)


def test_running_statistics_are_updated_once() -> None:
    captured = capture(nn.BatchNorm1d(8), torch.randn(5, 8))
    found = reasons(captured)
    assert found["_native_batch_norm_legit_functional"] == CHANGED
    assert found["copy_"] == "changes its arguments"
    assert sum(".copy_." in op.target for op in captured.graph.ops) == 3  # mean, variance, number of batches


def test_batch_norm_without_running_statistics_may_run_twice() -> None:
    captured = capture(nn.BatchNorm1d(8, track_running_stats=False), torch.randn(5, 8))
    assert reasons(captured) == {}


def test_shapes_that_depend_on_data_are_kept_when_they_are_captured() -> None:
    def model(x: Tensor) -> Tensor:
        return (x[x.nonzero(as_tuple=True)] ** 2).sum()

    with dynamo_config.patch(capture_dynamic_output_shape_ops=True):
        captured = capture(model, torch.randn(3, 4, requires_grad=True))
    assert reasons(captured) == {"nonzero": "output depends on values", "index": "output depends on values"}
