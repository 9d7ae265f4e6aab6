"""Tiny training graphs with the live bytes of every step counted by hand, and the schedule of an untouched step."""

from collections.abc import Callable
from dataclasses import dataclass

from bench.graphs import StepBuilder
from torchecho.cost.model import OpCosts
from torchecho.ir.graph import Category, Phase, TrainingGraph
from torchecho.ir.schedule import Schedule

BACKWARD = Phase.BACKWARD


@dataclass(frozen=True)
class Counted:
    """A graph, and by hand: live bytes at each step of the untouched step, and the bytes in its stash."""

    graph: TrainingGraph
    costs: OpCosts
    live_bytes: tuple[int, ...]
    stash_bytes: int


def _counted(step: StepBuilder, live_bytes: tuple[int, ...], stash_bytes: int) -> Counted:
    return Counted(*step.build(), live_bytes, stash_bytes)


def chain() -> Counted:
    """x -> a -> b -> loss; the backward reads b, then a, then x."""
    step = StepBuilder("chain")
    x = step.source("x", 2)
    (a,) = step.op("a", [x], [8], seconds=3.0)
    (b,) = step.op("b", [a], [16], seconds=5.0)
    (loss,) = step.op("loss", [b], [1], category=Category.OUTPUT, held=True)
    t = step.source("t", 1, Category.TANGENT, held=False)
    (gb,) = step.op("gb", [t, b], [16], phase=BACKWARD, category=Category.TEMPORARY)
    (ga,) = step.op("ga", [gb, a], [8], phase=BACKWARD, category=Category.TEMPORARY)
    step.op("gx", [ga, x], [2], phase=BACKWARD, category=Category.GRADIENT, held=True)
    assert loss != gb
    # x2 throughout, loss1 once made: a 2+8; b 2+8+16; loss +1; gb: tangent1 a8 b16 gb16; ga: a8 gb16 ga8; gx: ga8 gx2
    return _counted(step, (10, 26, 27, 44, 35, 13), 24)


def diamond() -> Counted:
    """A value read on two paths that meet again; the gradients of the paths are added."""
    step = StepBuilder("diamond")
    x = step.source("x", 1)
    (a,) = step.op("a", [x], [10])
    (left,) = step.op("left", [a], [20])
    (right,) = step.op("right", [a], [30])
    step.op("join", [left, right], [2], category=Category.OUTPUT, held=True)
    t = step.source("t", 2, Category.TANGENT, held=False)
    (gl,) = step.op("gl", [t, left], [10], phase=BACKWARD, category=Category.TEMPORARY)
    (gr,) = step.op("gr", [t, right], [10], phase=BACKWARD, category=Category.TEMPORARY)
    (ga,) = step.op("ga", [gl, gr], [10], phase=BACKWARD, category=Category.TEMPORARY)
    step.op("gx", [ga, x], [1], phase=BACKWARD, category=Category.GRADIENT, held=True)
    # 1+10; +20; +30; join2 (right read a last); left right join t2 gl10; right join t gl gr; join gl gr ga; join ga gx1
    return _counted(step, (11, 31, 61, 53, 65, 55, 33, 14), 50)


def fan_out() -> Counted:
    """One value that three backward ops read, far apart."""
    step = StepBuilder("fan-out")
    x = step.source("x", 4, Category.PARAMETER)
    (a,) = step.op("a", [x], [100])
    step.op("loss", [a], [1], category=Category.OUTPUT, held=True)
    t = step.source("t", 1, Category.TANGENT, held=False)
    (g1,) = step.op("g1", [t, a], [5], phase=BACKWARD, category=Category.TEMPORARY)
    (g2,) = step.op("g2", [g1, a], [6], phase=BACKWARD, category=Category.TEMPORARY)
    (g3,) = step.op("g3", [g2, a], [7], phase=BACKWARD, category=Category.TEMPORARY)
    step.op("gx", [g3], [4], phase=BACKWARD, category=Category.GRADIENT, held=True)
    # 4+100; +1; +t1 +g1 5; g1 g2; g2 g3; 4 loss1 g3 7 gx4
    return _counted(step, (104, 105, 111, 116, 118, 16), 100)


def views() -> Counted:
    """The backward reads a view of a view: the storage behind stays alive, the views cost nothing."""
    step = StepBuilder("views")
    x = step.source("x", 3)
    (a,) = step.op("a", [x], [12])
    flat = step.view("flat", a)
    half = step.view("half", flat)
    step.op("loss", [half], [1], category=Category.OUTPUT, held=True)
    t = step.source("t", 1, Category.TANGENT, held=False)
    late = step.view("late", half, phase=BACKWARD)
    (g,) = step.op("g", [t, late], [12], phase=BACKWARD, category=Category.TEMPORARY)
    step.op("gx", [g], [3], phase=BACKWARD, category=Category.GRADIENT, held=True)
    # 3+12; +1; a12 loss1 t1 g12; loss1 g12 gx3
    return _counted(step, (15, 16, 29, 19), 12)


def unused_output() -> Counted:
    """An op with two outputs of which nobody reads the second: it lives for one step only."""
    step = StepBuilder("unused output", base_bytes=1000)
    x = step.source("x", 2)
    values = step.op("pool", [x], [6, 50], workspace_bytes=9)
    step.op("loss", [values[0]], [1], category=Category.OUTPUT, held=True)
    t = step.source("t", 1, Category.TANGENT, held=False)
    step.op("gx", [t, values[0]], [2], phase=BACKWARD, category=Category.GRADIENT, held=True)
    # base1000 x2: pool 6+50+9 workspace; pool6 loss1; pool6 loss1 t1 gx2
    return _counted(step, (1067, 1009, 1012), 6)


def held_output() -> Counted:
    """An output that the caller keeps and the backward reads again: alive whatever is decided, never in the stash."""
    step = StepBuilder("held output")
    x = step.source("x", 2, held=False)
    (h,) = step.op("h", [x], [40])
    (y,) = step.op("y", [h], [20], category=Category.OUTPUT, held=True)
    t = step.source("t", 20, Category.TANGENT, held=False)
    (gh,) = step.op("gh", [t, y], [40], phase=BACKWARD, category=Category.TEMPORARY)
    step.op("gx", [gh, h], [2], phase=BACKWARD, category=Category.GRADIENT, held=True)
    # x2 h40 (x is not held: freed after its last read); h40 y20; h y t20 gh40; h y gh gx2
    return _counted(step, (42, 60, 120, 102), 40)


def random_draw() -> Counted:
    """An op that may not run twice: its mask must be stashed."""
    step = StepBuilder("random draw")
    x = step.source("x", 8)
    (mask,) = step.op("mask", [x], [2], keep_reason="draws random numbers")
    (y,) = step.op("y", [x, mask], [8])
    step.op("loss", [y], [1], category=Category.OUTPUT, held=True)
    t = step.source("t", 1, Category.TANGENT, held=False)
    (gy,) = step.op("gy", [t, y], [8], phase=BACKWARD, category=Category.TEMPORARY)
    step.op("gx", [gy, mask], [8], phase=BACKWARD, category=Category.GRADIENT, held=True)
    # 8+2; +8; +1; mask2 y8 loss1 t1 gy8; mask2 loss1 gy8 gx8
    return _counted(step, (10, 18, 19, 28, 27), 10)


def lstm() -> Counted:
    """Two steps of a small LSTM cell: gates, cell state, hidden state; the backward reads gates and cells."""
    step = StepBuilder("lstm")
    w = step.source("w", 16, Category.PARAMETER)
    (g1,) = step.op("gates1", [w], [8])
    (c1,) = step.op("cell1", [g1], [2])
    (h1,) = step.op("hidden1", [g1, c1], [2])
    (g2,) = step.op("gates2", [w, h1], [8])
    (c2,) = step.op("cell2", [g2, c1], [2])
    step.op("hidden2", [g2, c2], [2], category=Category.OUTPUT, held=True)
    t = step.source("t", 2, Category.TANGENT, held=False)
    (d2,) = step.op("d2", [t, g2, c2, c1], [8, 2], phase=BACKWARD, category=Category.TEMPORARY)[:1]
    (w2,) = step.op("w2", [d2, h1], [16], phase=BACKWARD, category=Category.TEMPORARY)
    (d1,) = step.op("d1", [d2, g1, c1], [8], phase=BACKWARD, category=Category.TEMPORARY)
    step.op("w1", [d1, w2], [16], phase=BACKWARD, category=Category.GRADIENT, held=True)
    # w16: 8; 10; 12; g1 c1 h1 g2 20; +c2 22; +h2 24; +t2 d2 8+2 36; w2: g1 c1 h1 h2 d2 w2 38;
    # d1: g1 c1 h2 d2 w2 d1 = 8+2+2+8+16+8 44; w1: h2 d1 w2 w1 = 2+8+16+16 42
    return _counted(step, (24, 26, 28, 36, 38, 40, 52, 54, 60, 58), 22)


def changed_in_place() -> Counted:
    """y is made, then z of x, then y is changed in place by z; both together make y again."""
    step = StepBuilder("changed in place")
    x = step.source("x", 2)
    (y,) = step.op("y", [x], [10], seconds=3.0, workspace_bytes=1)
    (z,) = step.op("z", [x], [4])
    step.op("y_", [y, z], [], seconds=2.0, workspace_bytes=3)
    step.again("y then y_", (0, 2))
    step.op("loss", [y], [1], category=Category.OUTPUT, held=True)
    t = step.source("t", 1, Category.TANGENT, held=False)
    (gl,) = step.op("gl", [t], [20], phase=BACKWARD, category=Category.TEMPORARY)
    step.op("gx", [gl, y], [2], phase=BACKWARD, category=Category.GRADIENT, held=True)
    # 2+10 and 1 of workspace; z4 16; 3 of workspace 19; y10 loss1 13; t1 gl20 34; y loss gl gx 35
    return _counted(step, (13, 16, 19, 13, 34, 35), 10)


ALL: dict[str, Callable[[], Counted]] = {
    made.__name__: made for made in (chain, diamond, fan_out, views, unused_output, held_output, random_draw, lstm)
}
REPEATING = {changed_in_place.__name__: changed_in_place}


def base_schedule(graph: TrainingGraph) -> Schedule:
    """Return the schedule that stashes everything: every op once, in order."""
    forward = tuple(i for i in graph.kernels if graph.ops[i].phase == Phase.FORWARD)
    backward = tuple(i for i in graph.kernels if graph.ops[i].phase == Phase.BACKWARD)
    return Schedule(forward + backward, len(forward))
