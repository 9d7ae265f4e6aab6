"""Tell how little time a budget can cost the translator in PyTorch's own kernels, next to what it costs.

Run as `python -m bench.nmt_limits` (`--steps 96`, `--pairs 15`).

The least that the plan's copies can take is each at the best time of its call in a loop of its own, where its operands
lie in the cache and the allocator hands out the same memory again and again; no plan inside the budget needs less of it
than the bound of the plan says. What a step under the plan takes beyond a plain one and its copies is the rest:
following the plan, and copies that find their operands in no cache, less what the memory that is not used saves.
Optimizer steps are left out.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from torchecho.api import measure, plans
from torchecho.apply.recipe import Recipe
from torchecho.bench.eager import EXTENTS
from torchecho.bench.measuring import make_training, seconds_of_first
from torchecho.bench.nmt import Steps
from torchecho.bench.training import Forward, Training, make_forward, paired_seconds
from torchecho.meter.step import seconds_of

_ROUNDS, _REPEATS = 5, 4

Look = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass
class Copies:
    """What the copies of one step call.

    Attributes:
        calls: For each kind of call how to make it, and how often it is made.
    """

    calls: dict[Any, tuple[Callable[[], Any], int]] = field(default_factory=dict)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what the copies of the steps inside call."""
        run = Recipe.run

        def run_and_note(recipe: Recipe) -> None:
            self._note_call(recipe)
            run(recipe)

        with mock.patch.object(Recipe, "run", run_and_note):
            yield

    def _note_call(self, recipe: Recipe) -> None:
        """Note a call with operands like those that it has now; follow-ups are left out: the bound stays one."""
        args, kwargs = recipe.operands()
        leaves = tree_leaves((args, kwargs))
        kind = (recipe.func, *[_look(v) if isinstance(v, torch.Tensor) else repr(v) for v in leaves])
        call, count = self.calls.get(kind) or (_call_alike(recipe.func, args, kwargs), 0)
        self.calls[kind] = call, count + 1

    def least_seconds(self) -> list[tuple[float, int, str]]:
        """Return the best seconds of each kind of call, how often it is made, and its name; the longest first."""
        found = [(_best_seconds(call), count, str(kind[0])) for kind, (call, count) in self.calls.items()]
        return sorted(found, key=lambda one: -one[0] * one[1])


def _look(tensor: torch.Tensor) -> Look:
    return tensor.shape, tensor.stride(), tensor.dtype


def _call_alike(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Return the call on copies of its operands: those of the step die with it."""
    args, kwargs = tree_map_only(torch.Tensor, _copy, (args, kwargs))
    return lambda: func(*args, **kwargs)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage().clone()
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(storage, int(tensor.storage_offset()), tensor.shape, tensor.stride())


def _best_seconds(call: Callable[[], Any]) -> float:
    def repeated() -> None:
        for _ in range(_REPEATS):
            call()

    return min(seconds_of(repeated) for _ in range(_ROUNDS)) / _REPEATS


def _step(training: Training, forward: Forward) -> None:
    training.model.zero_grad(set_to_none=True)
    forward(*training.batch).backward()


def limits(size: Steps, factor: float, pairs: int) -> None:
    """Measure one shape under one budget, and print what it is and what it could be."""
    training = make_training(asdict(size))
    untouched = measure(lambda: training.step(training.model), warmup=2)
    options = {"engine": "eager", "memory_budget": int(untouched.peak_bytes / factor)}
    forward = make_forward(training, "torchecho", None, options)
    seconds_of_first(training, forward)
    _step(training, forward)
    copies = Copies()
    with copies.noted():
        _step(training, forward)
    planned, plain = paired_seconds(lambda: _step(training, forward), lambda: _step(training, training.model), pairs)
    added = statistics.median(own / base - 1 for own, base in zip(planned, plain, strict=True))
    _print(f"{size}, eager's peak / {factor:g}", statistics.median(plain), added, copies.least_seconds())


def _print(title: str, plain_seconds: float, added: float, calls: list[tuple[float, int, str]]) -> None:
    plan = plans()[-1]
    needed = min(plan.overhead_bound / plan.overhead, 1.0)
    copied = sum(best * count for best, count, _ in calls) / plain_seconds
    print(f"{title}: a plain step takes {1e3 * plain_seconds:.0f} ms")
    print(f"  under the plan                               {added:+.1%}")
    print(f"    {sum(count for _, count, _ in calls):5} copied calls, each at its best time    {copied:+.1%}")
    print(f"    {needed:5.0%} of that, which any plan needs         {needed * copied:+.1%}")
    print(f"    the rest                                   {added - copied:+.1%}")
    for best, count, name in calls[:6]:
        print(f"    {1e3 * best * count:6.1f} ms: {count:4} times {1e3 * best:.2f} ms, {name}")


def main() -> None:
    """Print the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="*", help="source steps of the shapes to measure: all by default")
    parser.add_argument("--pairs", type=int, default=15, help="timed steps of each kind")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for size, factors in EXTENTS["full"].translator:
        if not arguments.steps or size.source_steps in arguments.steps:
            for factor in factors:
                limits(size, factor, arguments.pairs)


if __name__ == "__main__":
    main()
