"""The training graph of a recorded step: live bytes counted by hand, and what may not be repeated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.steps import record
from tests.verify import verify_graph
from torchecho.capture.tape import Recorder
from torchecho.capture.tape_graph import TapeCapture, build_graph
from torchecho.errors import CaptureError
from torchecho.ir.graph import Category, Phase
from torchecho.planner.decisions import Decisions, build_schedule, find_needs, save_all
from torchecho.simulate.replay import live_bytes, replay_tables

ROW_BYTES, WEIGHT_BYTES, NUMBER_BYTES = 4 * 16 * 4, 16 * 16 * 4, 4


def _given() -> tuple[Tensor, nn.Parameter]:
    return torch.ones(4, 16), nn.Parameter(torch.eye(16))


def _chain(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(torch.exp(x @ w)).sum()


def _live(capture: TapeCapture, recomputed: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    """Return the live bytes at each op that runs something, without workspaces."""
    graph = capture.graph
    decisions = save_all(graph)
    if recomputed:
        again = tuple(op.phase == Phase.FORWARD and _short(op.target) in recomputed for op in graph.ops)
        decisions = Decisions(again, decisions.reuse_window)
    schedule = build_schedule(find_needs(graph), decisions)
    live = live_bytes(replay_tables(graph, (0,) * len(graph.ops)), schedule)
    ops = [graph.ops[index] for index in schedule.steps]
    return [(_short(op.target), int(size)) for op, size in zip(ops, live, strict=True) if not op.is_mark]


def _short(target: str) -> str:
    return target.split(".")[1] if "." in target else target


def test_live_bytes_of_a_chain() -> None:
    capture = build_graph(record(_chain, *_given()))
    verify_graph(capture.graph)
    fixed = ROW_BYTES + WEIGHT_BYTES
    loss, ones = NUMBER_BYTES, NUMBER_BYTES
    assert _live(capture) == [
        ("mm", fixed + ROW_BYTES),
        ("exp", fixed + 2 * ROW_BYTES),  # the product is read the last time
        ("tanh", fixed + 2 * ROW_BYTES),
        ("sum", fixed + 2 * ROW_BYTES + loss),  # exp and tanh are saved
        ("ones_like", fixed + 2 * ROW_BYTES + loss + ones),
        ("tanh_backward", fixed + 3 * ROW_BYTES + loss + ones),
        ("mul", fixed + 3 * ROW_BYTES + loss + ones),  # tanh is gone; exp, and the gradients of both
        ("mm", fixed + ROW_BYTES + WEIGHT_BYTES + loss + ones),
    ]


def test_live_bytes_of_a_plan() -> None:
    capture = build_graph(record(_chain, *_given()))
    fixed = ROW_BYTES + WEIGHT_BYTES
    loss, ones = NUMBER_BYTES, NUMBER_BYTES
    assert _live(capture, ("tanh",)) == [
        ("mm", fixed + ROW_BYTES),
        ("exp", fixed + 2 * ROW_BYTES),
        ("tanh", fixed + 2 * ROW_BYTES),
        ("sum", fixed + 2 * ROW_BYTES + loss),
        ("ones_like", fixed + ROW_BYTES + loss + ones),
        ("tanh", fixed + 2 * ROW_BYTES + loss + ones),
        ("tanh_backward", fixed + 3 * ROW_BYTES + loss + ones),
        ("mul", fixed + 3 * ROW_BYTES + loss + ones),
        ("mm", fixed + ROW_BYTES + WEIGHT_BYTES + loss + ones),
    ]


def test_what_the_program_holds_after_its_last_use_stays_until_it_lets_go() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        early = x @ w
        late = early.exp().exp().exp()
        del early
        return late.sum()

    fixed = ROW_BYTES + WEIGHT_BYTES
    found = _live(build_graph(record(program, *_given())))
    assert found[:4] == [
        ("mm", fixed + ROW_BYTES),
        ("exp", fixed + 2 * ROW_BYTES),
        ("exp", fixed + 3 * ROW_BYTES),
        ("exp", fixed + 4 * ROW_BYTES),
    ]
    # The product is gone; the three results are saved for the backward.
    assert found[4] == ("sum", fixed + 3 * ROW_BYTES + NUMBER_BYTES)


def test_what_is_not_differentiated_stays_as_long_as_its_nodes() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        unused = (x @ w).tanh().relu()
        loss = (x @ w).sum()
        del unused
        return loss

    fixed = ROW_BYTES + WEIGHT_BYTES
    found = _live(build_graph(record(program, *_given())))
    # The backward of tanh has its result saved, that of relu its own, until nobody holds the latter.
    assert found[3] == ("mm", fixed + 3 * ROW_BYTES)


def test_categories() -> None:
    capture = build_graph(record(_chain, *_given()))
    storages = capture.graph.storages
    assert [s.category for s in storages[:2]] == [Category.INPUT, Category.PARAMETER]
    gradients = [s for s in storages if s.category == Category.GRADIENT]
    assert [(s.size_bytes, s.held) for s in gradients] == [(WEIGHT_BYTES, True)]
    outputs = [s for s in storages if s.category == Category.OUTPUT]
    assert [(s.size_bytes, s.held) for s in outputs] == [(NUMBER_BYTES, True)]


def test_parameters_that_the_step_did_not_touch_are_in_the_base() -> None:
    capture = build_graph(record(_chain, *_given()), base_bytes=7, model_bytes=WEIGHT_BYTES + 100)
    assert capture.graph.base_bytes == 107


def test_numbers_given_for_tensors_are_counted() -> None:
    capture = build_graph(record(lambda x, w: (x @ w * 3.0).sum() * 0.5, *_given()))
    numbers = capture.graph.storages[-1]
    assert (numbers.name, numbers.size_bytes) == ("unseen", 2 * 8)


def test_what_was_allocated_out_of_sight_is_there_throughout_the_backward() -> None:
    recording = record(_chain, *_given())
    recording.unseen_bytes = 1000
    graph = build_graph(recording).graph
    assert graph.storages[-1].size_bytes == 1000
    assert graph.ops[-1].reads[-1] == len(graph.storages) - 1


STATE_BYTES = len(torch.get_rng_state())


class _Apart(torch.autograd.Function):
    """Keeps a state of the random numbers from forward to backward, as a checkpoint does, and takes one meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Callable[[], Tensor]) -> Tensor:
        ctx.take, ctx.state = take, take()
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        meanwhile = ctx.take()
        made = grads[0].cos()
        del meanwhile
        ctx.state = None
        return made.sin(), None


def test_live_bytes_of_what_is_made_outside_of_calls() -> None:
    recorder = Recorder(lambda t: t if t.is_leaf else t.detach(), lambda kept: kept)

    def take() -> Tensor:
        state = torch.get_rng_state()
        recorder.know_apart(state)
        return state

    x = torch.ones(4, 16, requires_grad=True)
    recorder.know_sources([x])
    with recorder:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
            loss = _Apart.apply(torch.tanh(x), take).sum()
        recorder.start_backward()
        loss.backward()
    fixed = ROW_BYTES
    assert _live(build_graph(recorder.finish())) == [
        ("tanh", fixed + ROW_BYTES + STATE_BYTES),
        ("exp", fixed + 2 * ROW_BYTES + STATE_BYTES),
        ("sum", fixed + 2 * ROW_BYTES + STATE_BYTES + NUMBER_BYTES),
        ("ones_like", fixed + ROW_BYTES + STATE_BYTES + 2 * NUMBER_BYTES),
        ("cos", fixed + 2 * ROW_BYTES + 2 * STATE_BYTES + 2 * NUMBER_BYTES),
        ("sin", fixed + 3 * ROW_BYTES + 2 * NUMBER_BYTES),
        ("tanh_backward", fixed + 3 * ROW_BYTES + 2 * NUMBER_BYTES),
    ]


def _reasons(capture: TapeCapture) -> dict[str, str]:
    return {_short(op.target): op.keep_reason for op in capture.graph.ops if op.phase == Phase.FORWARD}


def test_calls_around_writes_in_place_are_kept() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        y.squeeze_()
        before = torch.sinh(y.detach())
        y.add_(1.0)
        after = torch.cosh(y)
        return (before * after).sum()

    reasons = _reasons(build_graph(record(program, *_given())))
    assert reasons["mm"] == "the program changes in place what it makes"
    assert reasons["sinh"] == "the program changes in place what it reads"
    assert reasons["add_"] == "changes its arguments"
    assert reasons["cosh"] == reasons["mul"] == ""


def test_live_bytes_of_calls_that_are_repeated_together() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        y += x.exp()
        return torch.tanh(y).sum()

    capture = build_graph(record(program, *_given()))
    verify_graph(capture.graph)
    together = next(op for op in capture.graph.ops if op.repeats)
    assert [capture.graph.ops[i].target for i in together.repeats] == ["aten.mm.default", "aten.add_.Tensor"]
    assert [capture.graph.values[v].name for v in together.reads] == ["s0", "s1", "s3"]
    assert capture.calls_of_op[capture.graph.ops.index(together)] == (0, 2)
    fixed = ROW_BYTES + WEIGHT_BYTES
    loss, ones = NUMBER_BYTES, NUMBER_BYTES
    assert _live(capture, ("mm", "exp", "tanh")) == [
        ("mm", fixed + ROW_BYTES),
        ("exp", fixed + 2 * ROW_BYTES),
        ("add_", fixed + 2 * ROW_BYTES),
        ("tanh", fixed + 2 * ROW_BYTES),
        ("sum", fixed + ROW_BYTES + loss),
        ("ones_like", fixed + loss + ones),
        ("exp", fixed + ROW_BYTES + loss + ones),
        ("mm", fixed + 2 * ROW_BYTES + loss + ones),  # the product and the sum as one
        ("tanh", fixed + 2 * ROW_BYTES + loss + ones),  # of the sum, which nobody reads after
        ("tanh_backward", fixed + 2 * ROW_BYTES + loss + ones),
        ("mm", fixed + ROW_BYTES + WEIGHT_BYTES + loss + ones),
    ]


def test_random_draws_and_choices_are_kept() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w) * torch.rand_like(x)
        return torch.tanh(y.topk(3).values).sum()

    reasons = _reasons(build_graph(record(program, *_given())))
    assert reasons["rand_like"] == "draws random numbers"
    assert reasons["topk"] == "makes a discontinuous choice"
    assert reasons["tanh"] == ""


def test_backward_inside_the_forward_is_part_of_it() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(torch.tanh(leaf @ w).sum(), leaf)
        return (grad @ w).sum()

    capture = build_graph(record(program, *_given()))
    phases = [op.phase for op in capture.graph.ops]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.BACKWARD].index)
    assert build_schedule(find_needs(capture.graph), save_all(capture.graph)).steps
    assert _reasons(capture)["tanh"] == "a backward inside the forward reads what it makes"


def test_calls_can_be_made_again_on_fake_tensors() -> None:
    capture = build_graph(record(_chain, *_given()))
    index = next(i for i, op in enumerate(capture.graph.ops) if op.target == "aten.exp.default")
    func, args, kwargs = capture.call(index)
    assert func is torch.ops.aten.exp.default
    assert args[0].shape == (4, 16)
    assert kwargs == {}


def test_step_without_a_backward() -> None:
    with pytest.raises(CaptureError, match="no backward"):
        build_graph(record(_chain, *_given(), num_backwards=0))


def test_what_a_gradients_own_graph_saves_is_kept() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = torch.tanh(x @ w)
        (grad,) = torch.autograd.grad(y.exp().sum(), w, create_graph=True)
        return grad.sin().sum()

    reasons = _reasons(build_graph(record(program, *_given())))
    assert reasons["tanh"] == reasons["exp"] == "a gradient that is differentiated saves what it makes"
    assert reasons["sin"] == ""
