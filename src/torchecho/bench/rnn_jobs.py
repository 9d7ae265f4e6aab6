"""The jobs of the rnn workload; each runs in a process of its own."""

import copy
import functools
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import torchecho.nn
from torchecho.api import optimize, plans
from torchecho.bench.normalised import NormalisedLSTM
from torchecho.bench.plan_fields import plan_fields
from torchecho.bench.processes import Tell
from torchecho.meter import allocator
from torchecho.meter.step import seconds_of

_SEED = 0
_ANY_SLOWDOWN = 100.0  # more than any plan adds
_KINDS: Mapping[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    "lstm": (nn.LSTM, torchecho.nn.LSTM),
    "gru": (nn.GRU, torchecho.nn.GRU),
    "rnn": (nn.RNN, torchecho.nn.RNN),
    "normalised lstm": (NormalisedLSTM, functools.partial(torchecho.nn.VariantLSTM, layer_norm=True)),
}


@dataclass(frozen=True)
class _Trial:
    """A module, the input that it is given, and the gradient of its output."""

    module: nn.Module
    leaf: Tensor
    given: Any
    gradient: Tensor

    def forward(self) -> Tensor:
        """Return the output, as one tensor."""
        y = self.module(self.given)[0]
        return y.data if isinstance(y, PackedSequence) else y

    def step(self) -> None:
        """Do a forward and a backward."""
        self.clear()
        self.forward().backward(self.gradient)

    def clear(self) -> None:
        """Drop all gradients."""
        self.leaf.grad = None
        self.module.zero_grad()

    def results(self) -> list[Tensor]:
        """Return the output and every gradient of a step."""
        self.clear()
        y = self.forward()
        y.backward(self.gradient)
        found = [y, self.leaf.grad, *(p.grad for p in self.module.parameters())]
        return [t.detach().double() for t in found if t is not None]


def rnn_layers(tell: Tell, *, stack: Mapping[str, Any], pairs: int) -> list[dict[str, Any]]:
    """Measure torch.nn's module and torchecho's in each stash mode: memory, time in turns, error against double."""
    allocator.install()
    torch.manual_seed(_SEED)
    trials = make_trials(stack)
    reference = next(iter(trials.values()))
    exact = _double(reference).results()
    rows = {name: _memory(trial, stack) for name, trial in trials.items()}
    for name, trial in trials.items():
        rows[name]["error"] = max(_relative_error(f, e) for f, e in zip(trial.results(), exact, strict=True))
        trial.clear()
    tell(f"timing {pairs} steps of each")
    seconds: dict[str, list[float]] = {name: [] for name in trials}
    for _ in range(pairs):
        for name, trial in trials.items():
            seconds[name].append(seconds_of(trial.step))
    return [_row(name, rows[name], seconds[name], seconds["torch.nn"]) for name in trials]


def make_trials(stack: Mapping[str, Any]) -> dict[str, _Trial]:
    """Make torch.nn's module and torchecho's in each stash mode, with the same weights and input.

    Args:
        stack: The fields of a `torchecho.bench.rnn.Stack`.
    """
    T, B, H, layer = stack["T"], stack["B"], stack["H"], stack["layer"]
    theirs, ours = _KINDS[layer] if layer in _KINDS else _KINDS[layer.split()[-1]]
    extra: dict[str, Any] = {"proj_size": H // 2} if layer.startswith("projected") else {}
    dtype = torch.bfloat16 if layer.startswith("bfloat16") else torch.float32
    reference = theirs(H, H, stack["layers"], **extra).to(dtype)
    modules: dict[str, nn.Module] = {"torch.nn": reference}
    for stash in stack["stashes"]:
        modules[stash] = ours(H, H, stack["layers"], stash=stash, **extra).to(dtype)
        for parameter, like in zip(modules[stash].parameters(), reference.parameters(), strict=True):
            parameter.data.copy_(like)
    leaf = x = torch.randn(T, B, H, dtype=dtype)
    given: Any = x.requires_grad_()
    if layer.startswith("packed"):
        packed = pack_padded_sequence(x.detach(), torch.linspace(T, max(1, T // 3), B).long())
        leaf = packed.data.clone().requires_grad_()
        given = PackedSequence(leaf, packed.batch_sizes)
    gradient = torch.randn(*leaf.shape[:-1], extra.get("proj_size", H), dtype=dtype)
    return {name: _Trial(module, leaf, given, gradient) for name, module in modules.items()}


def _double(trial: _Trial) -> _Trial:
    leaf = trial.leaf.detach().double().requires_grad_()
    packed = isinstance(trial.given, PackedSequence)
    given = PackedSequence(leaf, trial.given.batch_sizes) if packed else leaf
    return _Trial(copy.deepcopy(trial.module).double(), leaf, given, trial.gradient.double())


def _relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).abs().max() / exact.abs().max().clamp_min(1e-30))


def _memory(trial: _Trial, stack: Mapping[str, Any]) -> dict[str, float]:
    """Return what is live after the forward above what was before it, and the peak of a step above the same."""
    trial.step()
    trial.clear()
    gc.collect()
    before = allocator.live_bytes()
    y = trial.forward()
    stash_bytes = allocator.live_bytes() - before
    del y
    allocator.reset_peak()
    before = allocator.live_bytes()
    trial.step()
    peak_bytes = allocator.peak_bytes() - before
    trial.clear()
    unit = trial.gradient.numel() * trial.gradient.element_size() * stack["layers"]
    return {"stash_bytes": stash_bytes, "stash_units": stash_bytes / unit, "peak_bytes": peak_bytes}


def _row(
    name: str, figures: Mapping[str, float], seconds: Sequence[float], reference: Sequence[float]
) -> dict[str, Any]:
    own = {key: value for key, value in figures.items() if key != "peak_bytes"}
    if name != "torch.nn":
        own["speedup"] = statistics.median(r / s for r, s in zip(reference, seconds, strict=True))
    return {
        "system": "eager" if name == "torch.nn" else "torchecho",
        "setting": name,
        "peak_bytes": figures["peak_bytes"],
        "seconds": list(seconds),
        "seconds_median": statistics.median(seconds),
        "figures": own,
    }


class _Model(nn.Module):
    """A model with a 2-layer LSTM between linear layers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.layers = nn.LSTM(hidden, hidden, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layers(torch.tanh(self.before(x)))
        made: Tensor = self.after(torch.relu(y)).square().mean()
        return made


def rnn_compiled(tell: Tell, *, T: int, B: int, H: int, pairs: int) -> list[dict[str, Any]]:
    """Compile a model with an LSTM and measure it against eager torch.nn, at no slowdown and at the smallest peak."""
    torch.manual_seed(_SEED)
    model, x = _Model(H), torch.randn(T, B, H)
    rows: list[dict[str, Any]] = []
    settings: tuple[tuple[str, dict[str, Any]], ...] = (
        ("max_slowdown=0", {"max_slowdown": 0.0}),
        ("floor", {"max_slowdown": _ANY_SLOWDOWN}),
    )
    for setting, options in settings:
        twin = optimize(copy.deepcopy(model), engine="compile", **options)
        tell(f"compiling at {setting}")
        first = seconds_of(lambda twin=twin: twin(x).backward())  # type: ignore[misc]
        row = _paired(lambda twin=twin: twin(x).backward(), lambda: model(x).backward(), pairs)  # type: ignore[misc]
        compiled = {"setting": setting, "engine": "compile", "compile_seconds": first - row["seconds_median"]}
        rows.append({**plan_fields(plans()[-1]), **row, **compiled, "system": "torchecho"})
    return rows


def _paired(ours: Callable[[], None], theirs: Callable[[], None], pairs: int) -> dict[str, Any]:
    theirs()
    seconds = [(seconds_of(ours), seconds_of(theirs)) for _ in range(pairs)]
    speedup = statistics.median(t / o for o, t in seconds)
    own = [o for o, _ in seconds]
    return {"seconds": own, "seconds_median": statistics.median(own), "figures": {"speedup": speedup}}
