"""Run a step that no plan knows yet in little memory: recompute short chains of whatever may be repeated.

A recipe is written for every call that may be repeated and reads only what is kept anyway (parameters, what the program
was given, saved tensors) or what other recipes make, down to a few calls deep: chains are short, and between two of
them a saved tensor is kept. A large change in place is repeated with what it changes. A result that is small beside
what it is made of, or with, is not made again: a sum, the states of a recurrent layer beside its workspace would take
much time for few bytes. Nor is what the program still holds when the backward begins, as it often does the model's
output. Copies are dropped soon after their use. What takes much of the budget is made for each use anew: between two
uses, a copy of one recurrent layer's workspace would lie beside that of the next. This costs time, at worst a few runs
of the forward; it serves for one step, until there is a plan.
"""

import functools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchecho.apply.policy import Policy
from torchecho.apply.recipe import Recipe, results_of
from torchecho.apply.tape import Tape
from torchecho.capture.rules import keep_reason_of_call, may_follow
from torchecho.capture.storage import storage_key
from torchecho.capture.tape import Pack, Unpack

# Shallower chains keep one tensor more in every step of a loop; shorter windows run the same chain several times.
_DEPTH = 16
_WINDOW = 40
_WINDOW_OF_LARGE = 1
_SMALL = 1 / 16  # of what a call makes, or reads of recipes
_WORTH_FOLLOWING = 1 / 64  # of the budget
_LARGE = 1 / 16  # of the budget; the calls of one time step must stay below it, or each would run for each of its uses


class SafeTape(Tape):
    """Runs one forward and its backward without a plan.

    Args:
        given: Tensors that are there anyway.
        keep: As in `Tape`.
        give: As in `Tape`.
        budget_bytes: What the step should stay inside; None when that is not known.
    """

    def __init__(
        self,
        given: Iterable[torch.Tensor],
        keep: Pack | None = None,
        give: Unpack | None = None,
        *,
        budget_bytes: int | None = None,
    ) -> None:
        super().__init__(Policy((), (), ()), keep, give)
        self._large_bytes = math.inf if budget_bytes is None else _LARGE * budget_bytes
        self._worth_bytes = math.inf if budget_bytes is None else _WORTH_FOLLOWING * budget_bytes
        self._kept = {storage_key(tensor) for tensor in given}
        self._num_calls = 0
        self._depth: dict[int, int] = {}
        self._has_run_backward = False
        self._taken: list[weakref.ref[Recipe]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a call, and write a recipe for it where that costs no memory."""
        kwargs = kwargs or {}
        if self.is_replaying:
            return func(*args, **kwargs)
        self._num_calls += 1
        if func._schema.is_mutable:
            return self._follow(self._num_calls, func, args, kwargs)
        self._before_hidden_writes(func, args)
        if not _may_repeat(func):
            return func(*args, **kwargs)
        recipe = Recipe(self._num_calls, _WINDOW, func, self._switched())
        held = recipe.hold(args, kwargs, self._find)
        made = func(*args, **kwargs)
        results = results_of(made)
        made_bytes = _size_bytes(results)
        if self._is_cheap_to_hold(recipe, held, made_bytes):
            if made_bytes >= self._large_bytes:
                recipe.window = _WINDOW_OF_LARGE
            self._remember(recipe, _without_small(results, recipe), held)
            recipe.know_originals(results)
        return made

    def pack(self, tensor: torch.Tensor) -> Any:
        """Keep a saved tensor; recipes may read it from then on, until it is changed in place."""
        packed = super().pack(tensor)
        if self._find(tensor) is None:
            self._kept.add(storage_key(tensor))
        return packed

    def _before_write(self, tensor: torch.Tensor) -> None:
        """Make what reads a storage before it is changed, which no recipe may read from then on as what is kept."""
        part = self._find(tensor)
        if part is not None:
            part.recipe.originals = ()
        super()._before_write(tensor)
        self._kept.discard(storage_key(tensor))

    def _place_copies(self) -> None:
        """Place the copies of what the program does not hold; before another backward it may change what it holds."""
        known = {id(packed.part.recipe): packed.part.recipe for packed in self._alive(self._num_placed)}
        open_recipes = list(known.values()) if self.runs_once and not self._has_run_backward else []
        while open_recipes:
            recipe = open_recipes.pop()
            is_taken = recipe.take_originals()
            if is_taken:
                self._taken.append(weakref.ref(recipe))
            for part in () if is_taken else recipe.parts:
                if id(part.recipe) not in known:
                    known[id(part.recipe)] = part.recipe
                    open_recipes.append(part.recipe)
        super()._place_copies()

    def end_backward(self) -> None:
        """Part from the program with what another backward may ask for: the program may change what is its own."""
        self._has_run_backward = True
        for reference in self._taken:
            recipe = reference()
            if recipe is not None and not recipe.is_settled:
                recipe.part_from_originals()
        self._taken.clear()

    def _recipe_to_follow(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], written: Sequence[torch.Tensor]
    ) -> Recipe | None:
        """Return the recipe that a change in place can be repeated with, where that costs no memory.

        What is small is kept: in a loop over time, where gates are made in place, that ends the chain of each step.
        """
        is_worth_it = _size_bytes(written) >= self._worth_bytes and _may_follow(func)
        recipe = super()._recipe_to_follow(func, args, kwargs, written) if is_worth_it else None
        if recipe is None:
            return None
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        parts = [self._find(tensor) for tensor in read]
        others = [part.recipe for part in parts if part is not None and part.recipe is not recipe]
        depth = max([self._depth[recipe.number], *[1 + self._depth[other.number] for other in others]])
        held = [tensor for tensor, part in zip(read, parts, strict=True) if part is None]
        if not self._is_cheap(depth, held, _size_bytes(written)):
            return None
        self._depth[self._num_calls] = depth
        return recipe

    def _is_cheap_to_hold(self, recipe: Recipe, held: Sequence[torch.Tensor], made_bytes: int) -> bool:
        depth = 1 + max((self._depth[part.recipe.number] for part in recipe.parts), default=0)
        self._depth[recipe.number] = depth
        return self._is_cheap(depth, held, made_bytes)

    def _is_cheap(self, depth: int, held: Sequence[torch.Tensor], made_bytes: int) -> bool:
        return depth <= _DEPTH and all(self._costs_little(tensor, _SMALL * made_bytes) for tensor in held)

    def _costs_little(self, tensor: torch.Tensor, little_bytes: float) -> bool:
        """Return whether a tensor is kept anyway, or takes little."""
        key = storage_key(tensor)
        is_parameter = tensor.is_leaf and tensor.requires_grad
        is_there = is_parameter or key in self._kept
        return is_there or (key is not None and tensor.untyped_storage().nbytes() <= little_bytes)


def _without_small(results: Sequence[Any], recipe: Recipe) -> list[torch.Tensor | None]:
    """Return what a call made with None for what is small beside the rest, and beside what it reads of recipes."""
    sizes = [result.numel() if isinstance(result, torch.Tensor) else 0 for result in results]
    most = _SMALL * max([*sizes, *[part.shape.numel() for part in recipe.parts]], default=0)
    return [result if size > most else None for result, size in zip(results, sizes, strict=True)]


def _size_bytes(results: Sequence[Any]) -> int:
    """Return the bytes of what a call made; what it returns as it got it counts too."""
    return sum(result.nbytes for result in results if isinstance(result, torch.Tensor))


@functools.cache
def _may_follow(func: Any) -> bool:
    """Return whether calls of an operator may be repeated on a fresh copy of what they change in place."""
    return may_follow(func, (), {}, on_cuda=True)


@functools.cache
def _may_repeat(func: Any) -> bool:
    """Return whether calls of an operator may be repeated whatever their arguments are, and make something."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    is_view = any(result.alias_info is not None for result in func._schema.returns)
    return not is_view and not keep_reason_of_call(func, (), {}, on_cuda=True)
