"""Let nodes of a recorded backward run unwatched where PyTorch computes otherwise while a dispatch mode is active.

Some formulas of autograd look whether a dispatch mode is active and then avoid what tensor subclasses cannot do; the
gradient of a product even comes out in other bits. Such nodes run with the recorder's mode taken away, and are recorded
as one call each, with the memory that they took meanwhile.

Relies on: the formulas named below (torch/csrc/autograd/FunctionsManual.cpp, `isTensorSubclassLike`, torch 2.11 to
2.15); hooks of a node that run right before and right after it.

Not modelled: other formulas that only take more memory under a mode (`index`, `take`), so that their peak is foreseen
too high by a copy.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from torchecho.capture.tape import Recorder
from torchecho.engine import scope
from torchecho.meter.probe import PeakProbe, probe_available

_BRANCHING = frozenset(
    {
        "ProdBackward0",
        "ProdBackward1",
        "CumprodBackward0",
        "MaxBackward1",
        "MinBackward1",
        "MedianBackward0",
        "NanmedianBackward0",
    }
)


class UnwatchedNodes:
    """The nodes of one backward that run unwatched.

    Args:
        recorder: Who would watch them.
        roots: Where the backward begins.
        device: Device that the step runs on.
    """

    def __init__(self, recorder: Recorder, roots: Sequence[Node], device: torch.device) -> None:
        self._recorder = recorder
        self._probe = PeakProbe(device) if probe_available(device) else None
        self._handles: list[Any] = []
        for node in _reachable(roots):
            if node.name() in _BRANCHING:
                self._handles += [node.register_prehook(self._begins), node.register_hook(self._ended_of(node.name()))]

    def remove(self) -> None:
        """Leave the nodes as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begins(self, grads: Sequence[torch.Tensor]) -> None:  # noqa: ARG002 - the signature of a hook
        scope.remove_mode(self._recorder)
        if self._probe is not None:
            self._probe.start()

    def _ended_of(self, name: str) -> Any:
        def ended(made: Sequence[torch.Tensor | None], grads: Sequence[torch.Tensor | None]) -> None:
            workspace_bytes = 0
            if self._probe is not None:
                workspace_bytes = max(0, self._probe.read() - max(0, self._probe.kept_bytes))
                self._probe.stop()
            self._recorder.node_ran(name, grads, made, workspace_bytes)
            scope.push_mode(self._recorder)

        return ended


def _reachable(roots: Sequence[Node]) -> Iterator[Node]:
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
