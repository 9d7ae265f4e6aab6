"""Room that a plan leaves is spent: counted by hand on a step whose peak is one backward that nothing avoids."""

from dataclasses import replace

import pytest

from bench.graphs import StepBuilder
from torchecho.ir.graph import Category, Phase
from torchecho.planner.alternatives import choose
from torchecho.planner.planner import make_archive

LAYER, SMALL, GRADIENT = 12_500, 10, 7_500  # bytes
LAYER_SECONDS, SMALL_SECONDS = 100.0, 0.01
MANY = 1000


def step_with_a_layer_and_many_small_maps():
    """A layer whose backward comes last, and small maps whose backwards each need room for a gradient before that."""
    step = StepBuilder()
    x = step.source("x", 0)
    (layer,) = step.op("layer", [x], [LAYER], seconds=LAYER_SECONDS)
    small = [step.op(f"small{i}", [x], [SMALL], seconds=SMALL_SECONDS, target="small")[0] for i in range(MANY)]
    step.op("loss", [x], [0], category=Category.OUTPUT, held=True)
    for value in reversed(small):
        step.op("backward", [value], [0], workspace_bytes=GRADIENT, phase=Phase.BACKWARD)
    step.op("last", [layer], [0], phase=Phase.BACKWARD)
    graph, costs = step.build()
    return replace(graph, forward_is_fixed=True), costs  # as in the eager engine: the forward runs as it is


@pytest.mark.parametrize("num_over", [100, 200, 300])
def test_what_fits_beside_a_peak_elsewhere_is_kept(num_over):
    graph, costs = step_with_a_layer_and_many_small_maps()
    archive = make_archive(graph, costs)
    assert archive.baseline_peak_bytes == LAYER + MANY * SMALL + GRADIENT
    # All small maps made again, one at a time, and the layer kept; then the layer has to go, too.
    assert LAYER + SMALL + GRADIENT in {c.peak_bytes for c in archive.candidates}
    budget = LAYER + num_over * SMALL  # nothing avoids the layer
    # The first backward of a small map needs its gradient, and what is kept; then come fewer.
    fits = (budget - GRADIENT) // SMALL
    best = LAYER_SECONDS + max(MANY - fits, 0) * SMALL_SECONDS
    _, found = choose([archive], budget, None)
    assert found.added_seconds >= best - 1e-9
    one_level = (SMALL + GRADIENT) / 8 / SMALL * SMALL_SECONDS
    assert found.added_seconds <= best + one_level + 1e-9
