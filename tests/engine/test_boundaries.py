"""Backwards are announced to whoever listens in the thread, and torch's functions come back."""

import threading
from collections.abc import Sequence

import pytest
import torch
from torch.autograd.graph import Node, get_gradient_edge

from torchecho.engine import boundaries

BACKWARD, GRAD = torch.autograd.backward, torch.autograd.grad
DISABLE = torch._C._autograd._saved_tensors_hooks_disable


class Ear:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def before_backward(self, *, keeps_graph: bool, roots: Sequence[Node]) -> None:
        self.heard.append(("before", keeps_graph))
        self.roots = [root.name() for root in roots]

    def after_backward(self, *, succeeded: bool) -> None:
        self.heard.append(("after", succeeded))

    def hooks_refused(self) -> None:
        self.heard.append("refused")

    def close(self) -> None:
        self.heard.append("closed")


@pytest.fixture
def ear() -> object:
    one = Ear()
    boundaries.listen(one)
    yield one
    boundaries.stop_listening(one)
    assert torch.autograd.backward is BACKWARD
    assert torch.autograd.grad is GRAD
    assert torch._C._autograd._saved_tensors_hooks_disable is DISABLE


def _loss() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.ones(3, requires_grad=True)
    return x, (x * x).sum()


def test_backward_of_a_tensor(ear: Ear) -> None:
    x, loss = _loss()
    loss.backward()
    assert ear.heard == [("before", False), ("after", True)]
    assert torch.equal(x.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("options", "keeps_graph"),
    [
        ({}, False),
        ({"retain_graph": True}, True),
        ({"create_graph": True}, True),
        ({"create_graph": True, "retain_graph": False}, False),
    ],
)
def test_whether_the_graph_is_kept(ear: Ear, options: dict[str, bool], keeps_graph: bool) -> None:
    x, loss = _loss()
    torch.autograd.grad(loss, x, **options)
    assert ear.heard == [("before", keeps_graph), ("after", True)]


def test_backward_inside_a_backward_is_part_of_it(ear: Ear) -> None:
    x, loss = _loss()

    def inner(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            _loss()[1].backward()

    x.register_hook(inner)
    loss.backward()
    assert ear.heard == [("before", False), ("after", True)]


def test_backward_that_fails(ear: Ear) -> None:
    _, loss = _loss()
    loss.backward()
    ear.heard.clear()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert ear.heard == [("before", False), ("after", False)]


def test_other_threads_are_not_heard(ear: Ear) -> None:
    thread = threading.Thread(target=_loss()[1].backward)
    thread.start()
    thread.join()
    assert ear.heard == []


def test_hooks_that_are_refused(ear: Ear) -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        assert ear.heard == ["refused"]
    torch.func.grad(torch.sin)(torch.zeros(()))
    assert ear.heard[:2] == ["refused"] * 2


def test_where_the_backward_begins(ear: Ear) -> None:
    x, loss = _loss()
    torch.autograd.backward([loss, x.sin().sum()], retain_graph=True)
    assert ear.roots == ["SumBackward0", "SumBackward0"]
    torch.autograd.grad(get_gradient_edge(loss), x)
    assert ear.roots == ["SumBackward0"]


def test_thread_that_ends_listens_no_longer() -> None:
    one = Ear()
    thread = threading.Thread(target=boundaries.listen, args=(one,))
    thread.start()
    thread.join()
    assert one.heard == ["closed"]
    assert torch.autograd.backward is BACKWARD


def test_last_of_two_threads_puts_the_functions_back() -> None:
    first, second = Ear(), Ear()
    boundaries.listen(first)

    def other() -> None:
        boundaries.listen(second)
        _loss()[1].backward()
        boundaries.stop_listening(second)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert second.heard == [("before", False), ("after", True)]
    assert torch.autograd.backward is not BACKWARD
    boundaries.stop_listening(first)
    assert torch.autograd.backward is BACKWARD


def test_only_the_listener_can_stop() -> None:
    first, second = Ear(), Ear()
    boundaries.listen(first)
    boundaries.listen(second)
    boundaries.stop_listening(first)
    assert boundaries.listener() is second
    boundaries.stop_listening(second)
    assert boundaries.listener() is None
    assert torch.autograd.backward is BACKWARD


def test_function_that_was_bound_while_wrapped_still_works() -> None:
    one = Ear()
    boundaries.listen(one)
    bound = torch.autograd.grad
    boundaries.stop_listening(one)
    x, loss = _loss()
    assert torch.equal(bound(loss, x)[0], torch.full((3,), 2.0))
    assert one.heard == []
