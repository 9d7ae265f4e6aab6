"""Capture the joint graph of a small step as the compile engine does, and run it by a schedule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

from torchecho.apply.fx import apply_schedule
from torchecho.apply.lowering import lower_eager
from torchecho.capture.fx import JointCapture, capture_joint
from torchecho.ir.schedule import Schedule


def capture(model: Callable[..., Any], *inputs: Any, dynamic: bool = False, **options: Any) -> JointCapture:
    """Return the capture of the one joint graph of ``model(*inputs)``; `options` go to `capture_joint`."""
    found: list[JointCapture] = []

    def partition(module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **extra: Any) -> Any:
        static = extra.get("static_lifetime_input_indices")
        found.append(capture_joint(module, num_forward_outputs=num_fwd_outputs, static_indices=static, **options))
        return default_partition(
            module, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static
        )

    compiled_with(partition, model, dynamic=dynamic)(*inputs)
    assert len(found) == 1, f"{len(found)} joint graphs were made"
    return found[0]


class Scheduled:
    """A model whose step runs by the schedule that `schedule_of` makes of its capture.

    Attributes:
        captured: The capture of its joint graph, after the first call.
        halves: The forward and backward modules.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        schedule_of: Callable[[JointCapture], Schedule],
        *,
        dynamic: bool = False,
        in_place: bool = False,
    ) -> None:
        self._schedule_of, self._in_place = schedule_of, in_place
        self._call = compiled_with(self._partition, model, dynamic=dynamic)

    def __call__(self, *inputs: Any) -> Any:
        """Run the forward."""
        return self._call(*inputs)

    def _partition(self, module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **extra: Any) -> Any:
        self.captured = capture_joint(
            module,
            num_forward_outputs=num_fwd_outputs,
            static_indices=extra.get("static_lifetime_input_indices"),
            in_place=self._in_place,
        )
        self.halves = apply_schedule(self.captured, self._schedule_of(self.captured))
        return self.halves


def compiled_with(partition: Callable[..., Any], model: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    """Return a model compiled whole, with a partitioner, and lowered as it is."""
    backend = aot_autograd(
        fw_compiler=lower_eager,
        bw_compiler=lower_eager,
        inference_compiler=lower_eager,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
    return compiled
