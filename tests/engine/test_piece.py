"""One compiled piece: its probe, its fallback, and what it knows of the pieces before it."""

import logging
import warnings

import pytest
import torch
from torch import Tensor, nn

import torchecho
from torchecho.engine import piece
from torchecho.engine.piece import Piece
from torchecho.engine.planning import Surroundings
from torchecho.meter.optimizer import BytesOfOptimizers
from torchecho.options import parse_options
from torchecho.planner.request import Part

EAGER = {"lowering": "eager", "cost": "roofline"}
PLANNED = {**EAGER, "max_slowdown": 0.0}


class UsedTwice(nn.Module):
    """Uses one value twice: the peak of its step is in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a sum over (4, 4)."""
        a = x.exp()
        return (a.sin() + a.cos()).sum()


class Halves(nn.Module):
    """Two pieces with a graph break between them."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (4, 4) to a loss."""
        y = x.tanh().sigmoid()
        torch._dynamo.graph_break()
        return y.sigmoid().sum()


def run(model: nn.Module) -> Tensor:
    """Do one step on (4, 4) and return the gradient of the input."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()
    model(x).backward()
    assert x.grad is not None
    return x.grad


def fail(*_: object) -> None:
    """Fail where planning is not allowed to break the training."""
    raise KeyError("boom")


def test_the_measured_peak_stands_in_the_journal() -> None:
    run(torchecho.optimize(UsedTwice(), strict=True, **PLANNED))
    # x, exp, sin, cos and the sum of both, of 64 bytes each
    assert torchecho.plans()[-1].measured_peak_bytes == 5 * 64
    assert torchecho.plans()[-1].predicted_peak_bytes == 5 * 64


def test_only_the_first_step_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    amended: list[int] = []
    model = torchecho.optimize(UsedTwice(), strict=True, **PLANNED)
    run(model)
    monkeypatch.setattr(piece.journal, "amend", lambda number, **_: amended.append(number))
    before = len(torchecho.plans())
    run(model)
    assert amended == []
    assert len(torchecho.plans()) == before


def test_without_a_probe_the_step_runs_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece, "probe_available", lambda _: False)
    model = torchecho.optimize(UsedTwice(), strict=True, **PLANNED)
    gradients = [run(model), run(model), run(UsedTwice())]
    torch.testing.assert_close(gradients[0], gradients[2])
    assert torch.equal(gradients[0], gradients[1])
    assert torchecho.plans()[-1].measured_peak_bytes is None


def test_a_missed_budget_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece.PeakProbe, "stop", lambda _: 10**6)
    model = torchecho.optimize(UsedTwice(), memory_budget=1000, strict=True, **EAGER)
    with pytest.warns(torchecho.EchoWarning, match=r"measured peak .* is over the budget .* \(320 B was predicted\)"):
        run(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model)


def test_a_failure_is_warned_of_once_for_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece, "apply_schedule", fail)
    model = torchecho.optimize(Halves(), **PLANNED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients = [run(model), run(model)]
    ours = [str(w.message) for w in caught if w.category is torchecho.EchoWarning]
    assert len(ours) == 2
    assert all("runs untouched: planning it failed with KeyError: 'boom'" in message for message in ours)
    torch.testing.assert_close(gradients[0], run(Halves()))
    assert torch.equal(*gradients)


def test_a_piece_that_failed_is_in_no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece, "apply_schedule", fail)
    before = len(torchecho.plans())
    with pytest.warns(torchecho.EchoWarning):
        run(torchecho.optimize(UsedTwice(), **PLANNED))
    assert len(torchecho.plans()) == before


def test_strict_raises_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece, "apply_schedule", fail)
    model = torchecho.optimize(UsedTwice(), strict=True, **PLANNED)
    with pytest.raises(torchecho.EchoError, match=r"^planning \w+ failed: 'boom'$") as caught:
        run(model)
    assert type(caught.value) is torchecho.EchoError


def test_a_plan_is_logged_with_its_peak(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torchecho"):
        run(torchecho.optimize(UsedTwice(), strict=True, **PLANNED))
    assert any("peak 320 B predicted" in record.message for record in caplog.records)


# Dynamo itself looks at the gradient of the value that it hands from one piece to the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_later_piece_counts_what_the_earlier_ones_keep() -> None:
    before = len(torchecho.plans())
    run(torchecho.optimize(Halves(), strict=True, **PLANNED))
    first, second = torchecho.plans()[before:]
    # the first stashes its tanh, beside x and the sigmoid that it hands out; the second adds to those three its own
    # sigmoid and the loss, and in its backward the tangent and the gradient of what it was handed
    assert first.stash_bytes == 64
    assert second.predicted_peak_bytes == second.measured_peak_bytes == 5 * 64 + 4 + 4


def _piece(*, more_follows: bool, waiting: dict[Piece, int]) -> Piece:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)  # whose state is one number
    surroundings = Surroundings(parse_options(PLANNED), optimizer=BytesOfOptimizers(lambda: [optimizer]))
    surroundings.waiting.update(waiting)
    return Piece(surroundings, "step", more_follows=more_follows)


def test_the_part_of_a_piece_follows_from_its_neighbours() -> None:
    other = _piece(more_follows=True, waiting={})
    assert other.part == Part.MORE_FOLLOWS
    assert _piece(more_follows=False, waiting={}).part == Part.WHOLE
    assert _piece(more_follows=False, waiting={other: 100}).part == Part.LAST
    assert _piece(more_follows=True, waiting={other: 100}).part == Part.MORE_FOLLOWS


def test_optimizer_and_waiting_stashes_are_base() -> None:
    a, b = (_piece(more_follows=True, waiting={}) for _ in range(2))
    assert _piece(more_follows=False, waiting={a: 100, b: 30}).base_bytes == 134


# Dynamo itself looks at the gradient of the value that it hands from one piece to the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_step_that_was_given_up_does_not_weigh_on_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []
    remember = Piece.watched_forward

    def spy(self: Piece, *args: object) -> object:
        self_waiting = self.surroundings.waiting
        made = remember(self, *args)

        def forward(inputs: list[Tensor]) -> object:
            waiting.append(len(self_waiting))
            return made(inputs)

        forward._boxed_call = True
        return forward

    monkeypatch.setattr(Piece, "watched_forward", spy)
    model = torchecho.optimize(Halves(), strict=True, **PLANNED)
    for _ in range(2):
        model(torch.randn(4, 4, requires_grad=True))  # no backward
    assert waiting == [0, 1, 0, 1]
