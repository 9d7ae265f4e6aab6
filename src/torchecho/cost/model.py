"""What a cost model answers: the seconds and the workspace of each op."""

from dataclasses import dataclass
from typing import Protocol

from torchecho.ir.graph import Op, TrainingGraph


class CostModel(Protocol):
    """Gives the cost of running one op once, alone."""

    def op_seconds(self, op: Op, graph: TrainingGraph) -> float:
        """Return the seconds that the op takes; 0 for views."""
        ...

    def op_workspace_bytes(self, op: Op, graph: TrainingGraph) -> int:
        """Return the bytes that the op allocates and frees again while it runs, on top of its outputs."""
        ...


@dataclass(frozen=True, slots=True)
class OpCosts:
    """The costs of a training graph, one entry an op.

    Attributes:
        seconds: Seconds of each op; 0 for views.
        workspace_bytes: What each op allocates inside and frees.
        recipe_seconds: What the engine spends on each call that it makes again, besides the call.
    """

    seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    recipe_seconds: float = 0.0

    def copy_seconds(self, graph: TrainingGraph, index: int) -> float:
        """Return the seconds that running an op of the graph again adds to a step; 0 for views."""
        op = graph.ops[index]
        return 0.0 if op.is_view else self.seconds[index] + max(len(op.repeats), 1) * self.recipe_seconds


def estimate(graph: TrainingGraph, model: CostModel) -> OpCosts:
    """Ask `model` for the cost of every op of the graph; one that repeats others costs what they do together.

    Not modelled: caches warmed by the op before, ops that overlap.
    """
    seconds: list[float] = []
    workspace_bytes: list[int] = []
    for op in graph.ops:
        if op.repeats:
            seconds.append(sum(seconds[i] for i in op.repeats))
            workspace_bytes.append(max(workspace_bytes[i] for i in op.repeats))
        else:
            seconds.append(model.op_seconds(op, graph))
            workspace_bytes.append(model.op_workspace_bytes(op, graph))
    return OpCosts(tuple(seconds), tuple(workspace_bytes))
