"""Sums of gradients, which autograd's engine makes in place unless somebody watches: counted as in the next steps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchecho
from tests.engine.eager_steps import SIZE, STEPS, batch, gradients
from torchecho.capture.sums import find_sums_in_place
from torchecho.capture.tape import Recorder
from torchecho.capture.tape_graph import build_graph
from torchecho.engine.nodes import reachable, watch_sums
from torchecho.ir.graph import Phase
from torchecho.planner.decisions import build_schedule, find_needs, save_all
from torchecho.simulate.replay import live_bytes, replay_tables

ROW_BYTES, NUMBER_BYTES = 1000 * 4, 4


def _graph_of(program: Callable[[Tensor], Tensor]) -> tuple[Recorder, Tensor]:
    recorder = Recorder(lambda t: t if t.is_leaf else t.detach(), lambda kept: kept)
    x = torch.ones(1000, requires_grad=True)
    recorder.know_sources([x])
    with recorder:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
            loss = program(x)
        recorder.start_backward()
        handles = watch_sums(recorder, list(reachable([loss.grad_fn])))
        loss.backward()
        for handle in handles:
            handle.remove()
    return recorder, x


def test_sums_take_the_place_of_their_first_summand() -> None:
    recorder, _ = _graph_of(lambda x: (x.sin() + x.cos() + x.exp()).sum())
    recording = recorder.finish()
    graph = build_graph(recording).graph
    live = live_bytes(replay_tables(graph, (0,) * len(graph.ops)), build_schedule(find_needs(graph), save_all(graph)))
    backward = [
        (op.target.split(".")[1], int(size))
        for op, size in zip(graph.ops, live, strict=True)
        if op.phase == Phase.BACKWARD and not op.is_mark
    ]
    fixed = ROW_BYTES + 2 * NUMBER_BYTES  # x, the loss and the gradient that the backward begins with
    assert backward == [
        ("ones_like", fixed + ROW_BYTES),  # the exponential is saved
        ("mul", fixed + 2 * ROW_BYTES),
        ("sin", fixed + 2 * ROW_BYTES),
        ("neg", fixed + 3 * ROW_BYTES),
        ("mul", fixed + 4 * ROW_BYTES),  # what the formula made on its way is there until its end
        ("add", fixed + 2 * ROW_BYTES),
        ("cos", fixed + 2 * ROW_BYTES),
        ("mul", fixed + 3 * ROW_BYTES),
        ("add", fixed + 2 * ROW_BYTES),
    ]


def _kept(x: Tensor, kept: list[Tensor]) -> Tensor:
    first, last = x.sin(), x.exp()  # the backward of the last runs first
    last.grad_fn.register_hook(lambda made, grads: kept.extend(made))
    return (first + last).sum()


def test_what_somebody_keeps_is_not_added_to() -> None:
    kept: list[Tensor] = []
    recorder, _ = _graph_of(lambda x: _kept(x, kept))
    log = recorder.recording.log
    assert len(log.sums) == 1
    assert find_sums_in_place(log, recorder.recording.backward_starts or 0) == {}


PROGRAMS: dict[str, Callable[[Tensor, nn.Module], Tensor]] = {
    "residual": lambda x, layer: x + torch.tanh(layer(x)),
    "twice the same": lambda x, layer: torch.tanh(layer(x)) * x + (x + x),
    "shared weight": lambda x, layer: layer(torch.tanh(layer(torch.tanh(layer(x))))),
    "shared factor": lambda x, layer: torch.tanh(torch.tanh(x @ layer.weight) @ layer.weight) @ layer.weight,
    "parts": lambda x, layer: torch.cat([x[:, :8].exp(), layer(x)[:, 8:] * x[:, 8:]], 1),
    "gradient is expanded": lambda x, layer: (x.sum(1, keepdim=True) + layer(x)).expand(-1, SIZE).sin() + x,
}


class Model(nn.Module):
    """Two layers, and a program between them."""

    def __init__(self, program: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.program = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.program(torch.sigmoid(self.first(x)), self.layer), self.layer).pow(2).sum()


@pytest.mark.parametrize("num_rows", [2, 64])  # few: the largest gradients are those of weights
@pytest.mark.parametrize("slowdown", [0.0, 100.0])
@pytest.mark.parametrize("name", PROGRAMS)
def test_peak_is_that_of_steps_that_nobody_watches(name: str, slowdown: float, num_rows: int) -> None:
    torch.manual_seed(0)
    model = Model(PROGRAMS[name])
    torchecho.optimize(model, engine="eager", strict=True, max_slowdown=slowdown)
    for _ in range(STEPS):
        model(batch()[:num_rows]).backward()
        gradients(model)
    assert torchecho.plans()[-1].measured_peak_bytes == torchecho.plans()[-1].predicted_peak_bytes


def test_rehearsal_counts_sums_as_the_real_step() -> None:
    torch.manual_seed(0)
    model = Model(PROGRAMS["shared factor"])
    rehearsed = torchecho.plan(model, batch()[:2], engine="eager", max_slowdown=0.0)
    torchecho.optimize(model, engine="eager", strict=True, max_slowdown=0.0)
    model(batch()[:2]).backward()
    assert torchecho.plans()[-1].predicted_peak_bytes == rehearsed.predicted_peak_bytes
