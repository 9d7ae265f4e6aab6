"""Schedules become graph modules: copies in their places, the same bits, and every contract of AOTAutograd."""

import operator
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from tests.capture.joint import Scheduled, capture
from tests.end_to_end.models import CASES
from tests.end_to_end.steps import differences, run_step
from tests.graphs import base_schedule
from tests.verify import verify_schedule
from torchecho.apply.fx import apply_schedule, stashed_storages
from torchecho.capture.fx import JointCapture
from torchecho.errors import ApplyError
from torchecho.ir.graph import Phase
from torchecho.ir.schedule import Schedule
from torchecho.planner.decisions import Decisions, build_schedule, find_needs


def leaf(*shape: int) -> Tensor:
    """Return an input that wants a gradient."""
    return torch.randn(*shape, requires_grad=True)


def untouched(captured: JointCapture) -> Schedule:
    """Return the schedule that stashes everything."""
    return base_schedule(captured.graph)


def everything_again(captured: JointCapture) -> Schedule:
    """Return the schedule that recomputes whatever may be, anew after every gap between its uses."""
    num_ops = len(captured.graph.ops)
    return build_schedule(find_needs(captured.graph), Decisions((True,) * num_ops, (1,) * num_ops))


def written(forward: str, backward: str) -> Callable[[JointCapture], Schedule]:
    """Return a function that makes the schedule with these ops, by name."""

    def schedule_of(captured: JointCapture) -> Schedule:
        place = {op.name: i for i, op in enumerate(captured.graph.ops)}
        steps = tuple(place[name] for name in f"{forward} {backward}".split())
        return Schedule(steps, len(forward.split()))

    return schedule_of


def calls(module: fx.GraphModule) -> list[str]:
    """Return what a module calls, views and picked elements left out, a copy with a star."""
    views = ("detach", "expand", "t", "view", "split", "getitem", "transpose", "slice", "unbind")
    names = []
    for node in module.graph.nodes:
        target = str(getattr(node.target, "__name__", node.target)).split(".")[0]
        if node.op == "call_function" and target not in views:
            names.append(target + "*" * ("_recomputed" in node.name))
    return names


def waves(x: Tensor) -> Tensor:
    """Chain three ops; the backward reads each of their values."""
    return x.tanh().sigmoid().sin().sum()


WAVES_FORWARD = "tanh sigmoid sin sum_1"


@pytest.mark.parametrize(
    ("backward", "expected"),
    [
        ("cos mul sigmoid_backward tanh_backward", ["cos", "mul", "sigmoid_backward", "tanh_backward"]),
        (
            "tanh sigmoid cos mul sigmoid_backward tanh_backward",
            ["tanh*", "sigmoid*", "cos", "mul", "sigmoid_backward", "tanh_backward"],
        ),
        (
            "tanh sigmoid cos mul tanh sigmoid sigmoid_backward tanh tanh_backward",
            ["tanh*", "sigmoid*", "cos", "mul", "tanh*", "sigmoid*", "sigmoid_backward", "tanh*", "tanh_backward"],
        ),
        (
            "cos mul sigmoid sigmoid sigmoid_backward tanh_backward",
            ["cos", "mul", "sigmoid*", "sigmoid*", "sigmoid_backward", "tanh_backward"],
        ),
    ],
)
def test_copies_stand_where_the_schedule_has_them(backward: str, expected: list[str]) -> None:
    x = leaf(4, 4)
    planned = Scheduled(waves, written(WAVES_FORWARD, backward))
    (gradient,) = torch.autograd.grad(planned(x), x)
    verify_schedule(planned.captured.graph, written(WAVES_FORWARD, backward)(planned.captured))
    assert calls(planned.halves[1]) == expected
    torch.compiler.reset()
    (reference,) = torch.autograd.grad(Scheduled(waves, untouched)(x), x)
    assert torch.equal(gradient, reference)


def num_copies(planned: Scheduled) -> int:
    """Return how many copies of forward kernels the backward module runs."""
    kernels = {planned.captured.graph.ops[i].name for i in planned.captured.graph.kernels}
    found = (re.fullmatch(r"(.*)_recomputed(_\d+)?", node.name) for node in planned.halves[1].graph.nodes)
    return sum(match is not None and match[1] in kernels for match in found)


@pytest.mark.parametrize(
    "name",
    [
        "perceptron",
        "attention",
        "convolutions",
        "cell loop",
        "tied",
        "changing buffer",
        "views",
        "checkpointed",
        "autocast",
    ],
)
def test_recomputing_everything_before_every_use_gives_the_same_bits(name: str) -> None:
    left, recomputed = [], []
    for schedule_of in (untouched, everything_again):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, inputs = CASES[name].build(), CASES[name].inputs()
        planned = Scheduled(model, schedule_of)
        left.append(run_step(planned, inputs, model))
        recomputed.append(num_copies(planned))
        wanted = [planned.captured.graph.ops[i].phase for i in schedule_of(planned.captured).backward]
        assert recomputed[-1] == wanted.count(Phase.FORWARD)
    assert differences(*left) == []
    assert recomputed[0] == 0 < recomputed[1]


def test_every_copy_has_a_fake_tensor_of_its_own() -> None:
    planned = Scheduled(
        waves, written(WAVES_FORWARD, "tanh sigmoid cos mul tanh sigmoid sigmoid_backward tanh_backward")
    )
    planned(leaf(4, 4))
    copies = [n for n in planned.halves[1].graph.nodes if n.target is torch.ops.aten.tanh.default]
    storages = {n.meta["val"].untyped_storage()._cdata for n in copies}
    assert len(copies) == len(storages) == 2
    assert [n.meta["val"].shape for n in copies] == [(4, 4)] * 2


def test_views_look_at_the_newest_copy() -> None:
    def model(x: Tensor) -> Tensor:
        a, b = x.tanh().split(2, 1)
        return (a.t().sin() @ b.sigmoid()).sum()

    x = leaf(4, 4)
    backward = "tanh sin mm_1 tanh sigmoid mm_2 sigmoid_backward tanh cos mul cat tanh tanh_backward"
    planned = Scheduled(model, written("tanh sin sigmoid mm sum_1", backward))
    (gradient,) = torch.autograd.grad(planned(x), x)
    torch.compiler.reset()
    (reference,) = torch.autograd.grad(Scheduled(model, untouched)(x), x)
    assert torch.equal(gradient, reference)
    copies, looked_at = [], []
    for node in planned.halves[1].graph.nodes:
        copies += [node] * (node.target is torch.ops.aten.tanh.default)
        if node.target in VIEWS and behind(node).target is torch.ops.aten.tanh.default:
            assert behind(node) is copies[-1]
            looked_at.append(len(copies))
    # a half of the first copy turned for sin, one of the second for sigmoid, one of the third turned for cos, and the
    # whole of the fourth for tanh_backward; every half comes by way of a split
    splits = planned.halves[1].graph.find_nodes(op="call_function", target=torch.ops.aten.split.Tensor)
    assert [behind(node) for node in splits] == copies[:3]
    assert sorted(set(looked_at)) == [1, 2, 3, 4]


VIEWS = (torch.ops.aten.split.Tensor, torch.ops.aten.detach.default, torch.ops.aten.t.default, operator.getitem)


def behind(node: fx.Node) -> fx.Node:
    """Return the node whose storage a view looks at."""
    while node.target in VIEWS:
        node = node.args[0]
    return node


def test_a_storage_is_saved_once_however_many_views_are_read() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.tanh()
        return (y.t().sin() + y.view(2, 8).cos().view(4, 4) + y[:2].exp().sum()).sum()

    planned = Scheduled(model, untouched)
    planned(leaf(4, 4))
    saved = [n for n in planned.halves[1].graph.find_nodes(op="placeholder") if "tangents" not in n.name]
    # x is not needed; exp of the rows is saved for its own backward, tanh for everything else
    assert [n.name for n in saved] == ["tanh", "exp"]
    assert [tuple(n.meta["val"].shape) for n in saved] == [(4, 4), (2, 4)]


def test_sizes_stand_first_and_tangents_last() -> None:
    layer = nn.Linear(4, 4)

    def model(x: Tensor) -> Tensor:
        return torch.tanh(layer(x).view(x.shape[0] * 2, 2))

    planned = Scheduled(model, everything_again, dynamic=True)
    out = planned(torch.randn(6, 4))
    kinds = []
    for node in planned.halves[1].graph.find_nodes(op="placeholder"):
        is_size = isinstance(node.meta["val"], torch.SymInt)
        kinds.append("size" if is_size else "tangent" if "tangents" in node.name else "tensor")
    assert kinds == sorted(kinds, key=["size", "tensor", "tangent"].index)
    assert set(kinds) == {"size", "tensor", "tangent"}
    out.sum().backward()
    assert layer.weight.grad is not None


def test_a_changed_batch_runs_by_the_same_graph() -> None:
    model, captures = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), []

    def schedule_of(captured: JointCapture) -> Schedule:
        captures.append(captured)
        return everything_again(captured)

    planned = Scheduled(lambda x: model(x).exp(), schedule_of, dynamic=True)
    for rows in (6, 9, 2):
        x = torch.randn(rows, 4)
        model.zero_grad()
        planned(x).sum().backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).exp().sum().backward()
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)
    assert len(captures) == 1


def test_gradients_stay_in_the_order_of_the_inputs_and_none_stays_none() -> None:
    frozen, x, w = torch.randn(4, 4), leaf(3, 4), leaf(4, 4)
    planned = Scheduled(lambda x, frozen, w: ((x @ frozen).tanh() @ w).sin().sum(), everything_again)
    planned(x, frozen, w).backward()
    outputs = planned.halves[1].graph.find_nodes(op="output")[0].args[0]
    assert [None if n is None else tuple(n.meta["val"].shape) for n in outputs] == [(3, 4), None, (4, 4)]
    assert frozen.grad is None
    assert x.grad.shape == (3, 4)
    assert w.grad.shape == (4, 4)


def test_the_forward_hands_out_its_outputs_first() -> None:
    planned = Scheduled(lambda x: (x.tanh().sum(), x.sin()), untouched)
    x = leaf(4, 4)
    first, second = planned(x)
    outputs = planned.halves[0].graph.find_nodes(op="output")[0].args[0]
    assert [n.name for n in outputs[:2]] == ["sum_1", "sin"]
    assert torch.equal(first, x.tanh().sum())
    assert torch.equal(second, x.sin())


def test_a_gradient_that_is_an_input_as_it_is_crosses_over() -> None:
    # the gradient of w is x itself: no op of the backward makes it
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x + w

        @staticmethod
        def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
            return gradient, ctx.saved_tensors[0]

    x, w = leaf(4), leaf(4)
    planned = Scheduled(lambda x, w: Scale.apply(x, w).sin(), untouched)
    planned(x, w).sum().backward()
    assert torch.equal(w.grad, x.detach())


def test_the_version_check_is_kept_and_its_exemption_too() -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    loss = Scheduled(lambda x, w: (x @ w).sin().sum(), untouched)(x, w)
    with torch.no_grad():
        w.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def captured_waves() -> JointCapture:
    """Return the capture of `waves`."""
    return capture(waves, leaf(4, 4))


@pytest.mark.parametrize("forward", ["tanh sigmoid sin", "tanh sigmoid sum_1 sin", "sigmoid sin sum_1"])
def test_a_schedule_whose_forward_cannot_be_is_refused(forward: str) -> None:
    captured = captured_waves()
    schedule = written(forward, "cos mul sigmoid_backward tanh_backward")(captured)
    with pytest.raises(ApplyError, match="the forward module runs 4 ops where the schedule has"):
        apply_schedule(captured, schedule)


def test_a_forward_op_that_nothing_needs_is_refused() -> None:
    captured = capture(lambda x: (x.tanh().sum(), x.sin())[0], leaf(4, 4))
    names = [op.name for op in captured.graph.ops if not op.is_view]
    assert "sin" not in names  # never captured: nothing reads it
    doubled = written("tanh sum_1 sum_1", "tanh_backward")(captured)
    with pytest.raises(ApplyError, match=r"runs 2 ops where the schedule has 3"):
        apply_schedule(captured, doubled)


def test_a_backward_step_before_what_it_reads_is_refused() -> None:
    captured = captured_waves()
    schedule = written(WAVES_FORWARD, "mul cos sigmoid_backward tanh_backward")(captured)
    with pytest.raises(ApplyError, match="cos is needed in the backward phase before the schedule makes it"):
        apply_schedule(captured, schedule)


def test_a_gradient_that_nothing_makes_is_refused() -> None:
    captured = captured_waves()
    schedule = written(WAVES_FORWARD, "cos mul sigmoid_backward")(captured)
    with pytest.raises(ApplyError, match="tanh_backward is needed"):
        apply_schedule(captured, schedule)


def test_what_crosses_over_is_what_the_backward_reads_first() -> None:
    captured = captured_waves()

    def crossing(backward: str) -> list[str]:
        found = stashed_storages(captured, written(WAVES_FORWARD, backward)(captured))
        return [captured.graph.storages[s].name for s in found]

    assert crossing("cos mul sigmoid_backward tanh_backward") == ["tanh", "sigmoid"]
    assert crossing("sigmoid cos mul sigmoid_backward tanh_backward") == ["tanh"]
    assert crossing("tanh sigmoid cos mul sigmoid_backward tanh_backward") == ["primals_1"]
    assert crossing("cos mul sigmoid sigmoid_backward tanh_backward") == ["tanh", "sigmoid"]


def test_applying_leaves_the_capture_as_it_was() -> None:
    captured = captured_waves()
    before = [(n.name, n.op, n.args) for n in captured.module.graph.nodes]
    schedule = everything_again(captured)
    first = [calls(half) for half in apply_schedule(captured, schedule)]
    apply_schedule(captured, untouched(captured))
    assert [calls(half) for half in apply_schedule(captured, schedule)] == first
    assert [(n.name, n.op, n.args) for n in captured.module.graph.nodes] == before


def test_a_capture_of_other_costs_applies_alike() -> None:
    captured = captured_waves()
    other = replace(captured, graph=replace(captured.graph, base_bytes=10**6))
    schedule = everything_again(captured)
    assert [calls(h) for h in apply_schedule(other, schedule)] == [calls(h) for h in apply_schedule(captured, schedule)]
