"""Look at an autograd graph before its backward runs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch.autograd.graph import Node

from torchecho.capture.tape import Recorder


def reachable(roots: Sequence[Node]) -> Iterator[Node]:
    """Yield every node of a graph once."""
    seen = set(roots)
    open_nodes = list(seen)
    while open_nodes:
        node = open_nodes.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                open_nodes.append(following)


def watch_sums(recorder: Recorder, nodes: Sequence[Node]) -> list[Any]:
    """Let a recorder know which sums of gradients are made by autograd's engine; return the handles of the hooks.

    Args:
        recorder: Who watches the backward.
        nodes: All nodes of the graph. Hooks go to those that hand on a gradient which is added to that of another.
    """
    slots = Counter(slot for node in nodes for slot in node.next_functions)
    return [
        node.register_hook(lambda made, grads: recorder.sums_follow(made))  # noqa: ARG005 - the signature of a hook
        for node in nodes
        if any(slot[0] is not None and slots[slot] > 1 for slot in node.next_functions)
    ]
