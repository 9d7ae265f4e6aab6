"""Guess the costs of ops at sizes that were never measured from those of the same ops at other sizes."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torchecho.cost.model import CostModel, OpCosts
from torchecho.cost.roofline import op_traffic_bytes
from torchecho.ir.graph import Op, TrainingGraph


@dataclass(frozen=True, slots=True)
class Scaled:
    """Cost model: what another model says, times how far that model was off for the same target in a known graph.

    Attributes:
        model: The model that knows how costs grow with sizes.
        seconds_ratio: For each target the known seconds over the model's; 1 for targets that are not known.
        workspace_ratio: For each target the workspace over the bytes that the op reads and writes; 0 likewise.
    """

    model: CostModel
    seconds_ratio: Mapping[str, float]
    workspace_ratio: Mapping[str, float]

    def op_seconds(self, op: Op, graph: TrainingGraph) -> float:
        """Return the scaled seconds."""
        return self.model.op_seconds(op, graph) * self.seconds_ratio.get(op.target, 1.0)

    def op_workspace_bytes(self, op: Op, graph: TrainingGraph) -> int:
        """Return the workspace in proportion to the bytes that the op reads and writes."""
        return round(op_traffic_bytes(op, graph) * self.workspace_ratio.get(op.target, 0.0))


def scale_to(model: CostModel, graph: TrainingGraph, costs: OpCosts) -> Scaled:
    """Return a model scaled to the known costs of a graph: by the median for seconds, by the most for workspace."""
    seconds: dict[str, list[float]] = defaultdict(list)
    workspace: dict[str, float] = defaultdict(float)
    for index, many in _kinds(graph):
        op = graph.ops[index]
        modelled = model.op_seconds(op, graph)
        traffic = op_traffic_bytes(op, graph)
        if modelled > 0:
            seconds[op.target] += [costs.seconds[index] / modelled] * many
        if traffic:
            workspace[op.target] = max(workspace[op.target], costs.workspace_bytes[index] / traffic)
    return Scaled(model, {target: statistics.median(ratios) for target, ratios in seconds.items()}, dict(workspace))


def _kinds(graph: TrainingGraph) -> list[tuple[int, int]]:
    """Return the first kernel of each signature and how many there are; one without a signature is of its own kind."""
    first: dict[object, int] = {}
    many: Counter[int] = Counter()
    for index in graph.kernels:
        op = graph.ops[index]
        if not op.is_mark:
            many[first.setdefault(op.signature or index, index)] += 1
    return list(many.items())
