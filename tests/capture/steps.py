"""Record one training step of a function."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchecho.capture.recording import Recording
from torchecho.capture.tape import Recorder


def _keep(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_leaf else tensor.detach()


def record(program: Callable[..., Tensor], *given: Tensor, num_backwards: int = 1) -> Recording:
    """Record the forward of a function that returns a loss, and its backward."""
    recorder = Recorder(_keep, lambda kept: kept)
    recorder.know_sources(given)
    with recorder:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
            loss = program(*given)
        if num_backwards:
            recorder.start_backward()
        for left in reversed(range(num_backwards)):
            loss.backward(retain_graph=left > 0)
    return recorder.finish()
