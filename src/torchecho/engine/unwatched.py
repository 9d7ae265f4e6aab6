"""Let nodes of a recorded backward run unwatched where PyTorch computes otherwise while a dispatch mode is active.

Some formulas of autograd look whether a dispatch mode is active and then avoid what tensor subclasses cannot do: they
make a copy instead of writing in place, or compute in another order, so that the gradients of a product and of a value
that is filled in even come out in other bits. Such nodes run with the recorder's mode taken away, and are recorded as
one call each, with the memory that they took meanwhile.

Relies on: the formulas named below (`isTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp and
aten/src/ATen/native, torch 2.11 to 2.15); hooks of a node that run right before and right after it.

Not modelled: that a number which a formula multiplies or divides by is wrapped in a tensor of 8 bytes under a mode.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from torchecho.capture.tape import Recorder
from torchecho.engine import scope
from torchecho.engine.nodes import watch_sums
from torchecho.meter.probe import PeakProbe, probe_available

# Names of nodes, with the numbers of those of their forms that branch.
_BRANCHING = frozenset(
    f"{name}Backward{form}"
    for name, forms in {
        "Prod": "01",
        "Cumprod": "0",
        "Max": "01",
        "Min": "01",
        "Median": "01",
        "Nanmedian": "01",
        "Sort": "01",
        "Topk": "0",
        "Kthvalue": "0",
        "Mode": "0",
        "Cummax": "0",
        "Cummin": "0",
        "Index": "0",
        "IndexSelect": "0",
        "Gather": "0",
        "Take": "0",
        "Put": "0",
        "MaskedSelect": "0",
        "MaskedScatter": "0",
        "MaskedFill": "1",
        "Trace": "0",
        "Clamp": "0",
        "Renorm": "0",
        "Ormqr": "0",
        "LinalgEig": "0",
        "LinalgLstsq": "0",
        "LinalgHouseholderProduct": "0",
    }.items()
    for form in forms
)


class UnwatchedNodes:
    """The nodes of one backward that run unwatched; of the others the sums of what they make are watched.

    Args:
        recorder: Who would watch them.
        nodes: All nodes of the graph.
        device: Device that the step runs on.
    """

    def __init__(self, recorder: Recorder, nodes: Sequence[Node], device: torch.device) -> None:
        self._recorder = recorder
        self._probe = PeakProbe(device) if probe_available(device) else None
        self._handles: list[Any] = []  # of the nodes themselves none is held: they hold what they saved
        for node in nodes:
            if node.name() in _BRANCHING:
                self._handles += [node.register_prehook(self._begins), node.register_hook(self._ended_of(node.name()))]
        self._handles += watch_sums(recorder, nodes)  # after the others: what a node has made is known by then

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
