"""A model in training, and ways to run its step: untouched, PyTorch's own, and torchecho's."""

import contextlib
import copy
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _get_mkldnn_enabled, _set_mkldnn_enabled  # private: the public switch warns about other flags
from torch._dynamo import config as dynamo_config  # private: allow_rnn has no public name
from torch._dynamo import lookup_backend
from torch._functorch import config as functorch_config  # private: activation_memory_budget has no public name

from torchecho.api import optimize
from torchecho.meter.step import seconds_of
from torchecho.nn import convert

Forward = Callable[..., Tensor]
_STATE = ("parameters", "buffers")


@dataclass
class Training:
    """A model whose call returns the loss, its optimizer, and one batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Sequence[Tensor]

    @property
    def num_parameters(self) -> int:
        """Numbers in the parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def to(self, device: str) -> "Training":
        """Move the model and the batch to a device; return self.

        On CUDA this asks for deterministic kernels first.
        """
        if device == "cuda":
            ask_for_deterministic_kernels()
        self.model.to(device)
        self.batch = [tensor.to(device) for tensor in self.batch]
        return self

    def converted(self) -> "Training":
        """Return the same training with torchecho's recurrent layers for PyTorch's, on the same parameters."""
        kept = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        return Training(convert(copy.deepcopy(self.model, kept)), self.optimizer, self.batch)

    def step(self, forward: Forward) -> float:
        """Run forward, backward, optimizer step and the release of the gradients; return the loss."""
        loss = forward(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def ask_for_deterministic_kernels() -> None:
    """Let CUDA's libraries take kernels that repeat their bits, in this process, before it first uses them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with this
    torch.use_deterministic_algorithms(True, warn_only=True)


def make_forward(training: Training, system: str, setting: float | None, options: Mapping[str, Any]) -> Forward:
    """Return the model's forward under a system; the first call compiles it.

    Args:
        training: What is trained.
        system: ``"eager"``, ``"compile"``, ``"memory_budget"``, ``"torchecho"``, or ``"stash_all"``: PyTorch's lowering
            of ``"compile"`` and ``"memory_budget"`` with nothing recomputed, which is the reference of both.
        setting: Activation memory budget in [0, 1] of ``"memory_budget"``.
        options: Options of torchecho.
    """
    if system == "eager":
        return training.model
    if system == "torchecho":
        # A shallow copy shares all tensors; so the model itself, and other copies, still run as they did.
        dynamic = None if options.get("engine") == "eager" else False
        return optimize(copy.copy(training.model), dynamic=dynamic, optimizer=training.optimizer, **options)
    partition = "aot_eager_default_partitioner" if system == "stash_all" else "aot_eager"
    lower = lookup_backend(partition)

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        fraction = 1.0 if setting is None else setting
        with _unrolling(), functorch_config.patch(activation_memory_budget=fraction):
            return lower(module, inputs)

    compiled = torch.compile(training.model, backend=backend, dynamic=False)

    def forward(*batch: Tensor) -> Tensor:
        with dynamo_config.patch(allow_rnn=True):
            result: Tensor = compiled(*batch)
        return result

    return forward


@contextlib.contextmanager
def _unrolling() -> Iterator[None]:
    """Trace recurrent layers as torchecho does: with oneDNN on they can become one op that cannot be trained."""
    enabled = _get_mkldnn_enabled()
    _set_mkldnn_enabled(False)
    try:
        yield
    finally:
        _set_mkldnn_enabled(enabled)


class Snapshot:
    """The state of a training at one moment, to compare steps that start from it.

    It is kept as plain bytes, so that it does not count among the live tensors of a measured step.
    """

    def __init__(self, training: Training, seed: int) -> None:
        self._training = training
        self._seed = seed
        state = io.BytesIO()
        torch.save((training.model.state_dict(), training.optimizer.state_dict()), state)
        self._state = state.getvalue()

    def step(self, forward: Forward) -> tuple[float, dict[str, str]]:
        """Run one step from the snapshot; return its loss and a digest of each part of what it left behind."""
        training = self._training
        model_state, optimizer_state = torch.load(io.BytesIO(self._state))
        training.model.load_state_dict(model_state)
        training.optimizer.load_state_dict(optimizer_state)
        del model_state, optimizer_state
        torch.manual_seed(self._seed)
        loss = forward(*training.batch)
        loss.backward()
        parts = {"loss": _digest([loss]), "gradients": _digest(p.grad for p in training.model.parameters())}
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        parts |= {name: _digest(getattr(training.model, name)()) for name in _STATE}
        states = [torch.get_rng_state()]
        if training.batch[0].is_cuda:
            states.append(torch.cuda.get_rng_state())
        parts["random state"] = _digest(states)
        return float(loss.detach()), parts


def _digest(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
        else:
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def paired_seconds(
    first: Callable[[], object], second: Callable[[], object], pairs: int
) -> tuple[list[float], list[float]]:
    """Time two steps in turn, the order changing from pair to pair, after one untimed run of each."""
    first()
    second()
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds[which].append(seconds_of((first, second)[which]))
    return seconds
