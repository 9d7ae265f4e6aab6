"""Schedules of a tape written by hand: what is called, in which order, and what is alive when."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.graphs import base_schedule
from tests.verify import verify_graph, verify_schedule
from torchecho.apply.kernel_tape import apply_to_tape, stashed_storages
from torchecho.capture.kernel_graph import TapeFacts, graph_of
from torchecho.capture.kernel_tape import Entry, Tape, TapeStorage
from torchecho.errors import ApplyError
from torchecho.ir.graph import Category, TrainingGraph
from torchecho.ir.schedule import Schedule

# y = double(x), z = double(y), loss = total(z); the backward fills dx from y, z and the tangent.
X, Y, Z, LOSS, TANGENT, DX = range(6)
DOUBLE_X, DOUBLE_Y, TOTAL, BACK = range(4)


def entry(
    code: str, reads: tuple[int, ...], writes: tuple[int, ...] = (), makes: tuple[tuple[int, str], ...] = ()
) -> Entry:
    """Return an entry of which only the text and the storages matter."""
    label = code.split("(", maxsplit=1)[0]
    return Entry(label, code, reads, writes, makes, (), "", "", len, (), {})


class Calls:
    """The functions that the tape names; notes what is called and what of `watched` is alive then."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def double(self, source: Tensor, into: Tensor) -> None:
        """Fill `into` with twice `source`."""
        self.made.append("double")
        into.copy_(2 * source)

    def total(self, source: Tensor) -> Tensor:
        """Return the sum."""
        self.made.append("total")
        return source.sum()

    def back(self, y: Tensor, z: Tensor, tangent: Tensor, into: Tensor) -> None:
        """Fill `into` with something of all the others."""
        self.made.append("back")
        into.copy_(tangent * (y + z))


@pytest.fixture
def calls() -> Calls:
    """Return functions that have not been called."""
    return Calls()


def tape(calls: Calls, room: int = 2) -> Tape:
    """Return the tape; its forward hands on y and z, and x when there is room."""
    buffer = "torch.empty(3)"
    saved = [("s1", Y), ("s2", Z), ("s0", X)][:room]
    return Tape(
        storages=[
            TapeStorage("x", 12, (3,), "float32", is_given=True),
            *(TapeStorage(name, 12, (3,), "float32", code=buffer) for name in ("y", "z")),
            TapeStorage("loss", 4, (), "float32"),
            TapeStorage("tangent", 4, (), "float32", is_given=True),
            TapeStorage("dx", 12, (3,), "float32", code=buffer),
        ],
        forward=[
            entry("double(s0, s1)", (X,), (Y,)),
            entry("double(s1, s2)", (Y,), (Z,)),
            entry("total(s2)", (Z,), makes=((LOSS, ""),)),
        ],
        backward=[entry("back(s1, s2, s4, s5)", (Y, Z, TANGENT), (DX,))],
        objects={"torch": torch, "double": calls.double, "total": calls.total, "back": calls.back},
        forward_inputs=[X],
        forward_outputs=[("s3", LOSS), *saved],
        backward_inputs=[*(storage for _, storage in saved), TANGENT],
        backward_outputs=[("s5", DX)],
    )


def facts(**changed: Any) -> TapeFacts:
    """Return the facts of a step with one user output."""
    default: dict[str, Any] = {"static_inputs": frozenset(), "trained_inputs": frozenset({0}), "nodes": {}}
    return TapeFacts(**{"num_forward_outputs": 1, "base_bytes": 0, "model_bytes": 0, **default, **changed})


def run(made: Tape, graph: TrainingGraph, schedule: Schedule) -> tuple[list[Any], Tensor]:
    """Run a schedule on x = (1, 2, 3) and return what the forward hands over, and dx."""
    applied = apply_to_tape(made, graph, schedule, num_forward_outputs=1)
    inputs = [torch.tensor([1.0, 2.0, 3.0])]
    handed = list(applied.forward(inputs))
    assert inputs == []
    (dx,) = applied.backward([*handed[1:], torch.tensor(10.0)])
    return handed, dx


def test_graph_has_the_lifetimes_of_the_tape(calls: Calls) -> None:
    graph = graph_of(tape(calls), facts())
    verify_graph(graph)
    assert [s.category for s in graph.storages] == [
        Category.INPUT,
        Category.ACTIVATION,
        Category.ACTIVATION,
        Category.OUTPUT,
        Category.TANGENT,
        Category.GRADIENT,
    ]
    assert [s.producer for s in graph.storages] == [None, DOUBLE_X, DOUBLE_Y, TOTAL, None, BACK]
    assert [op.keep_reason for op in graph.ops] == [""] * 4


def test_untouched_schedule_calls_the_tape_as_it_is(calls: Calls) -> None:
    made = tape(calls)
    graph = graph_of(made, facts())
    handed, dx = run(made, graph, base_schedule(graph))
    assert calls.made == ["double", "double", "total", "back"]
    assert handed[0].item() == 24
    assert dx.tolist() == [60.0, 120.0, 180.0]


def test_recomputed_copies_run_before_they_are_needed(calls: Calls) -> None:
    made = tape(calls)
    graph = graph_of(made, facts())
    schedule = Schedule((DOUBLE_X, DOUBLE_Y, TOTAL, DOUBLE_X, DOUBLE_Y, BACK), 3)
    verify_schedule(graph, schedule)
    assert stashed_storages(made, graph, schedule) == (X,)
    handed, dx = run(made, graph, schedule)
    assert calls.made == ["double", "double", "total", "double", "double", "back"]
    assert [tensor.numel() for tensor in handed[1:]] == [3, 0]  # x, and a tensor without bytes
    assert dx.tolist() == [60.0, 120.0, 180.0]


def test_stash_without_room_is_refused(calls: Calls) -> None:
    made = tape(calls, room=1)
    graph = graph_of(made, facts())
    with pytest.raises(ApplyError, match="stashes 2 tensors, and the generated code has room for 1"):
        apply_to_tape(made, graph, base_schedule(graph), num_forward_outputs=1)


def test_kernels_that_change_inputs_or_share_a_result_run_once(calls: Calls) -> None:
    made = tape(calls)
    made.forward.append(entry("double(s1, s0)", (Y,), (X,)))
    made.forward.append(entry("double(s0, s2)", (X,), (Z,)))
    graph = graph_of(made, facts())
    assert [op.keep_reason for op in graph.ops[:5]] == [
        "reads an input that the forward changes in place",
        "fills its result together with another kernel",
        "",
        "changes its arguments",
        "reads an input that the forward changes in place",
    ]
