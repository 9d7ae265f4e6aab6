"""Let all processes of a distributed program plan alike."""

import json

import torch.distributed as dist

from torchecho.cost.model import OpCosts
from torchecho.ir.graph import TrainingGraph
from torchecho.planner.facts import graph_hash


def same_on_every_rank(graph: TrainingGraph, costs: OpCosts) -> OpCosts:
    """Return the costs that the first rank to ask had for this graph; equal costs make equal plans.

    The processes meet in the store of the process group, not in a collective: a rank that plans what no other does, or
    plans it later, keeps nobody waiting.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return costs
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way to the group's store
    own = json.dumps([costs.seconds, costs.workspace_bytes])
    seconds, workspace_bytes = json.loads(store.compare_set(f"torchecho/costs/{graph_hash(graph)}", "", own))
    return OpCosts(tuple(seconds), tuple(workspace_bytes))


def own_rank() -> int | None:
    """Return this process's rank; None when the process group has not begun, or has ended."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None
