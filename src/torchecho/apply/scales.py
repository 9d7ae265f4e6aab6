"""Weigh a step while it follows a policy: its peaks, and what it would keep if it recomputed less."""

from collections import Counter
from collections.abc import Callable

import torch

from torchecho.apply.recipe import Part, Recipe
from torchecho.planner.relief import RecomputedCall


class Scales:
    """Takes down what `torchecho.planner.relief` needs to know of a step.

    Args:
        next_peak: Returns the most bytes that were live since it was last called.

    Attributes:
        peaks: Most live bytes of each segment that has ended; what the backward asks for begins a new one.
        calls: What was recomputed, in order.
        is_sound: Whether all that was asked for was asked for by a backward that frees its graph; what a graph that is
            kept has saved lives longer than anyone asks for it.
    """

    def __init__(self, next_peak: Callable[[], int]) -> None:
        self.peaks: list[int] = []
        self.calls: list[RecomputedCall] = []
        self.is_sound = True
        self._next_peak = next_peak
        self._asked: list[tuple[int, int]] = []
        self._unasked: Counter[tuple[int, int]] = Counter()
        self._node = -1

    def made(self, recipe: Recipe, call: int | None) -> None:
        """Take note of a new recipe for a call of the policy."""
        recipe.serial = len(self.calls)
        self.calls.append(RecomputedCall(call))
        self.read(recipe)

    def read(self, recipe: Recipe) -> None:
        """Take note of what a recipe reads of others."""
        self.calls[recipe.serial].reads.update((part.recipe.serial, part.result) for part in recipe.parts)

    def holds(self, recipe: Recipe, result: int, tensor: torch.Tensor) -> None:
        """Take note of a result of a recipe."""
        self.calls[recipe.serial].result_bytes[result] = tensor.untyped_storage().nbytes()

    def saves(self, part: Part) -> None:
        """Take note that autograd saves what a recipe makes: it may never ask for it, and hold it all the same."""
        self._unasked[part.recipe.serial, part.result] += 1

    def asks(self, part: Part, node: int, *, frees_graph: bool) -> None:
        """Take note that a backward asks for what a recipe makes, for an autograd node."""
        self.is_sound = self.is_sound and frees_graph
        self.peaks.append(self._next_peak())
        if node != self._node:
            self._let_go()
            self._node = node
        self._asked.append((part.recipe.serial, part.result))
        self._unasked[part.recipe.serial, part.result] -= 1

    def end(self) -> None:
        """Take note that the backward has ended."""
        self.peaks.append(self._next_peak())
        self._asked += [key for key, left in self._unasked.items() if left > 0]
        self._let_go()

    def _let_go(self) -> None:
        """Take note of what the last node held until now, to the end of the last segment that has ended."""
        for serial, result in self._asked:
            self.calls[serial].last_uses[result] = len(self.peaks) - 1
        self._asked.clear()
