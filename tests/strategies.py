"""Random training graphs, costs and decisions for hypothesis."""

from hypothesis import strategies as st

from bench.graphs import StepBuilder
from torchecho.cost.model import OpCosts
from torchecho.ir.graph import Category, Phase, TrainingGraph
from torchecho.planner.decisions import Decisions

SIZES = st.integers(0, 12)
SECONDS = st.integers(0, 9).map(float)


@st.composite
def training_graphs(
    draw: st.DrawFn, max_forward: int = 6, max_backward: int = 6, *, repeats: bool = False
) -> tuple[TrainingGraph, OpCosts]:
    """Draw a small step: views, several outputs, unused outputs, held outputs, ops that may not repeat, tangents.

    Args:
        draw: Of hypothesis.
        max_forward: Most ops of the forward.
        max_backward: Most ops of the backward.
        repeats: Have ops that repeat others as one.
    """
    step = StepBuilder("random", base_bytes=draw(st.integers(0, 3)))
    values = [
        step.source("w", draw(SIZES), Category.PARAMETER),
        step.source("x", draw(SIZES), Category.INPUT, held=draw(st.booleans())),
    ]
    for index in range(draw(st.integers(1, max_forward))):
        made = _draw_op(draw, step, f"f{index}", values)
        if repeats and draw(st.booleans()):
            made += step.op(f"f{index}_", [*made, *_draw_reads(draw, values)], draw(st.lists(SIZES, max_size=1)))
            step.again(f"f{index} again", (len(step.ops) - 2, len(step.ops) - 1))
        values += made
        if draw(st.integers(0, 4)) == 0:
            values.append(step.view(f"v{index}", draw(st.sampled_from(values))))
    values.append(step.source("t", draw(SIZES), Category.TANGENT, held=False))
    for index in range(draw(st.integers(1, max_backward))):
        reads = [values[-1], *_draw_reads(draw, values)]
        held = draw(st.booleans())
        values += step.op(
            f"b{index}",
            reads,
            [draw(SIZES)],
            seconds=draw(SECONDS) + 1,
            workspace_bytes=draw(st.integers(0, 2)),
            phase=Phase.BACKWARD,
            category=Category.GRADIENT if held else Category.TEMPORARY,
            held=held,
        )
    return step.build()


def _draw_reads(draw: st.DrawFn, values: list[int]) -> list[int]:
    return draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))


def _draw_op(draw: st.DrawFn, step: StepBuilder, name: str, values: list[int]) -> tuple[int, ...]:
    held = draw(st.integers(0, 5)) == 0
    return step.op(
        name,
        _draw_reads(draw, values),
        draw(st.lists(SIZES, min_size=1, max_size=2)),
        seconds=draw(SECONDS),
        workspace_bytes=draw(st.integers(0, 2)),
        category=Category.OUTPUT if held else Category.ACTIVATION,
        held=held,
        target=draw(st.sampled_from(["tanh", "mm"])),
        keep_reason="random" if draw(st.integers(0, 5)) == 0 else "",
    )


@st.composite
def decisions_for(draw: st.DrawFn, graph: TrainingGraph) -> Decisions:
    """Draw decisions about a graph, also for ops that may not be recomputed: those must be ignored."""
    num_ops = len(graph.ops)
    recompute = draw(st.lists(st.booleans(), min_size=num_ops, max_size=num_ops))
    window = draw(st.lists(st.integers(0, 3), min_size=num_ops, max_size=num_ops))
    return Decisions(tuple(recompute), tuple(window))
