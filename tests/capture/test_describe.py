"""Where an op comes from, and the key and the FLOPs of its cost."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchecho.nn
from tests.capture.joint import capture
from torchecho.capture import describe
from torchecho.capture.fx import JointCapture
from torchecho.ir.graph import Op


def forward_op(captured: JointCapture, target: str) -> Op:
    """Return the first op that calls `target`."""
    return next(op for op in captured.graph.ops if f".{target}." in op.target)


class Inner(nn.Module):
    """A layer inside a layer inside a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 4)."""
        return torch.tanh(self.linear(x))


class Outer(nn.Module):
    """Holds layers in a list and calls a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 4)."""
        for layer in self.layers:
            x = layer(x)
        return torch.sigmoid(x)


def test_the_module_path_is_that_of_named_modules() -> None:
    model = Outer()
    captured = capture(model, torch.randn(3, 4))
    paths = [op.module for op in captured.graph.ops if ".addmm." in op.target]
    assert paths == ["layers.0.linear", "layers.1.linear"]
    assert set(paths) <= {name for name, _ in model.named_modules()}
    assert [op.module for op in captured.graph.ops if ".tanh." in op.target] == ["layers.0", "layers.1"]
    assert forward_op(captured, "sigmoid").module == ""


def test_a_backward_op_belongs_to_the_module_of_its_forward() -> None:
    captured = capture(Outer(), torch.randn(3, 4))
    # the backward meets the second layer first
    assert [op.module for op in captured.graph.ops if ".tanh_backward." in op.target] == ["layers.1", "layers.0"]
    weights = [op.module for op in captured.graph.ops if ".mm." in op.target]
    assert weights == ["layers.1.linear", "layers.1.linear", "layers.0.linear"]


def test_the_source_line_is_that_of_the_training_code() -> None:
    captured = capture(Outer(), torch.randn(3, 4))
    lines, start = inspect.getsourcelines(Inner.forward)
    line = start + next(i for i, text in enumerate(lines) if "torch.tanh" in text)
    here = f"{Path(__file__).name}:{line}"
    assert forward_op(captured, "tanh").source == here
    assert forward_op(captured, "addmm").source == here  # not the line of nn.Linear inside torch
    assert forward_op(captured, "tanh_backward").source == here


def test_signatures_tell_strides_apart() -> None:
    captured = capture(lambda x: x.exp().sum() + x.t().exp().sum(), torch.randn(4, 4, requires_grad=True))
    first, second = (op.signature for op in captured.graph.ops if ".exp." in op.target)
    assert "[4,4|4,1]" in first
    assert "[4,4|1,4]" in second


@pytest.mark.parametrize(
    "other",
    [
        lambda x: F.softmax(x, 0).sum(),
        lambda x: F.softmax(x.double(), 1).sum(),
        lambda x: F.softmax(x[:, :3], 1).sum(),
    ],
)
def test_signatures_tell_arguments_dtypes_and_shapes_apart(other: object) -> None:
    def reference(x: Tensor) -> Tensor:
        return F.softmax(x, 1).sum()

    found = []
    for function in (reference, other, reference):
        torch.compiler.reset()
        found.append(forward_op(capture(function, torch.randn(4, 4, requires_grad=True)), "_softmax").signature)
    assert found[0] == found[2] != found[1]


def test_signatures_of_our_own_operators_change_with_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torchecho.nn.LSTM(3, 4)

    def signature() -> str:
        captured = capture(lambda x: layer(x)[0], torch.randn(5, 2, 3, requires_grad=True))
        return next(op.signature for op in captured.graph.ops if op.target.startswith("torchecho.lstm"))

    before = signature()
    assert signature() == before
    monkeypatch.setattr(describe, "sources_digest", lambda: "another")
    assert signature() != before


def test_views_have_no_signature_and_no_flops() -> None:
    captured = capture(lambda x: (x.t() @ x).sum(), torch.randn(3, 4, requires_grad=True))
    views = [op for op in captured.graph.ops if op.is_view]
    assert views
    assert all((op.signature, op.flops) == ("", 0) for op in views)


def test_flops_of_products_by_hand() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x, w).exp().sum()

    captured = capture(model, torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 4, 5, requires_grad=True))
    # 2 batches of (3, 4) @ (4, 5); a multiply-add counts as two; each of the two gradients costs as much
    assert [op.flops for op in captured.graph.ops if ".bmm." in op.target] == [2 * 2 * 3 * 4 * 5] * 3
    assert forward_op(captured, "exp").flops == 0


def test_flops_of_a_convolution_by_hand() -> None:
    layer = nn.Conv2d(3, 8, 3, padding=1)
    captured = capture(lambda x: layer(x).sum(), torch.randn(2, 3, 6, 6))
    # 8 outputs at 36 places of 2 images, each of 3 * 3 * 3 multiply-adds
    assert forward_op(captured, "convolution").flops == 2 * (2 * 36 * 8) * 27
