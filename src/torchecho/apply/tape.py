"""Carry a plan out while the program runs: keep recipes instead of feature maps, and replay them in the backward.

A dispatch mode sees the calls of the forward; for those that the plan recomputes it writes a recipe. A saved-tensor
hook keeps, of a feature map that has a recipe, only the recipe. When the backward asks for the first one, all uses of
every recipe are known, and copies are placed by the rule of `torchecho.planner.decisions`: a copy is made right before
its first use and dropped after its last; uses that are further apart than the window get a copy each.

The numbers of autograd's nodes stand for time: the backward runs them in descending order. A backward that asks in
another order, or twice, gets what it asks for too, by replaying whatever is missing.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchecho.apply import switches
from torchecho.apply.policy import FOLLOW, KEEP, WRITE, Follower, Policy
from torchecho.apply.recipe import Leaf, Packed, Part, Recipe, results_of, version_of
from torchecho.apply.replay import make, make_for_good, replay
from torchecho.apply.scales import Scales
from torchecho.capture.mode import LightMode
from torchecho.capture.rules import keep_reason_of_call
from torchecho.capture.schema import hidden_statistics, written_tensors
from torchecho.capture.storage import alias, storage_key
from torchecho.capture.tape import Pack, Unpack, node_number
from torchecho.errors import RecomputeError


class _Watch(weakref.ref[Any]):
    """A weak reference to a storage that knows its key."""

    __slots__ = ("key",)
    key: int


class _Replaying:
    """Runs calls as in the forward: below autograd, with gradients enabled, outside autocast, with its switches.

    A class, and not a generator: it is entered for nearly every saved tensor that is made again.
    """

    __slots__ = ("_around", "_autocast", "_below", "_had_gradients", "_tape", "_was_replaying")

    def __init__(self, tape: "Tape", around: switches.Switches) -> None:
        self._tape, self._around = tape, around

    def __enter__(self) -> None:
        if self._around != self._tape.switches:
            switches.put(self._tape.switches)
        self._was_replaying, self._tape.is_replaying = self._tape.is_replaying, True
        self._autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        for kind in self._autocast:
            torch.set_autocast_enabled(kind, False)
        self._had_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)  # what torch.enable_grad() sets, which costs as much as a small op
        self._below = torch._C._AutoDispatchBelowAutograd()
        self._below.__enter__()

    def __exit__(self, *_: object) -> None:
        self._below.__exit__(None, None, None)
        torch._C._set_grad_enabled(self._had_gradients)
        for kind in self._autocast:
            torch.set_autocast_enabled(kind, True)
        self._tape.is_replaying = self._was_replaying
        if self._around != self._tape.switches:
            switches.put(self._around)


class Tape(LightMode):
    """Runs one forward and its backward under a policy.

    Use it as a mode around the forward, with `pack` and `unpack` as saved-tensor hooks.

    Args:
        policy: What to recompute.
        keep: Hook for saved tensors that no recipe stands for; `stash` by default.
        give: Gives them back; `unstash` by default.
        scales: Are told what is recomputed, where somebody wants to know.

    Attributes:
        num_recomputed: How many calls were replayed.
        runs_once: No second backward of the same graph will come, so that recipes may be used up.
        is_replaying: Calls made now are not the program's.
        num_touched: How many calls and changes in place had to do with a recipe.
        num_saved: How many saved tensors had.
        follower: Where in the policy the program is.
        switches: How the switches that kernels look at were when the step began.
    """

    def __init__(
        self, policy: Policy, keep: Pack | None = None, give: Unpack | None = None, *, scales: Scales | None = None
    ) -> None:
        super().__init__()
        self.num_recomputed = self.num_touched = self.num_saved = 0
        self.runs_once = False
        self.is_replaying = False
        self._was_asked_early = self._has_used_up = False
        self._keep, self._give, self._scales = keep or stash, give or unstash, scales
        self.follower = Follower(policy)
        self.switches = switches.read()
        self._part_of: dict[int, tuple[Recipe, int, torch.dtype]] = {}
        self._watches: dict[int, _Watch] = {}
        self._readers: dict[int | None, list[weakref.ref[Recipe]]] = {}
        self._packed: list[weakref.ref[Packed]] = []
        self._waited_for: list[weakref.ref[Packed]] = []
        self._num_placed = 0
        self._copies: dict[int, list[Recipe]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a call, and write a recipe for it where the policy says so."""
        if self.is_replaying:
            return func(*args, **(kwargs or {}))
        decision = self.follower.next(func)
        if decision is KEEP:
            return func(*args, **(kwargs or {}))
        if decision is WRITE:
            self.before_writes(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))
        self._before_hidden_writes(func, args)
        self.num_touched += 1
        if decision == FOLLOW:
            return self._follow(self.follower.position, func, args, kwargs or {})
        if _may_draw(func) and keep_reason_of_call(func, args, kwargs or {}, on_cuda=True):
            return func(*args, **(kwargs or {}))  # the recorded step called it with a probability of 0
        recipe = Recipe(self.follower.position, decision, func, self._switched())
        held = recipe.hold(args, kwargs or {}, self._find)
        if self._scales is not None:
            self._scales.made(recipe, self.follower.planned_position)
        made = func(*args, **(kwargs or {}))
        self._remember(recipe, made, held)
        return made

    def _switched(self) -> switches.Switches | None:
        """Return how the switches are, where that is not as when the step began."""
        now = switches.read()
        return None if now == self.switches else now

    def pack(self, tensor: torch.Tensor) -> Any:
        """Keep a saved tensor: by its recipe where it has one."""
        part = self._find(tensor)
        if part is None:
            return self._keep(tensor)
        self.num_saved += 1
        if self._scales is not None:
            self._scales.saves(part)
        packed = Packed(node_number(), part)
        reference = weakref.ref(packed)
        self._packed.append(reference)
        part.recipe.saved.append(reference)
        return packed

    def unpack(self, packed: Any) -> torch.Tensor:
        """Give a saved tensor back, making it again where it was kept by its recipe."""
        if type(packed) is not Packed:
            return self._give(packed)
        if packed.tensor is not None:
            return packed.tensor
        if self._num_placed < len(self._packed):
            self._place_copies()
        part, place = packed.part, packed.node
        if self._scales is not None:
            self._scales.asks(part, place, frees_graph=self.runs_once)
        copies = [(one, place) for one in self._copies.pop(place, ())]
        if not part.recipe.has(part.result):
            # The clone that an op in place saves of what it changes counts as the node after it, and is asked for last.
            copies[:0] = [(one, place + 1) for one in self._copies.pop(place + 1, ())]
        self._was_asked_early = self._was_asked_early or not self.runs_once
        once = not self._was_asked_early
        self._has_used_up = self._has_used_up or once
        if copies or not part.recipe.has(part.result):
            with _Replaying(self, switches.read()):
                self.num_recomputed += sum(replay(one, at, once=once) for one, at in copies)
                if not part.recipe.has(part.result):
                    self.num_recomputed += make(part.recipe, part.result)
        tensor: torch.Tensor = part.get()
        part.recipe.read_once(part.result)
        if self.runs_once:
            packed.tensor = tensor
        return tensor

    def start_backward(self, *, keeps_graph: bool) -> None:
        """Prepare for a backward: copies that an earlier one of the same graph has used are placed again."""
        if self._was_asked_early and not self._has_used_up:
            self._was_asked_early, self._num_placed = False, 0
            self._copies.clear()
            for recipe in _with_makers({id(p.part.recipe): p.part.recipe for p in self._alive()}):
                recipe.start_anew()
        self.runs_once = not keeps_graph

    def end_backward(self) -> None:
        """Prepare for what the program does before another backward of the same graph."""

    def is_saving(self) -> bool:
        """Return whether autograd still saves something that has a recipe: another backward may ask for it."""
        return any(True for _ in self._alive())

    def tell_when_nothing_is_saved(self, tell: Callable[[], object]) -> None:
        """Call a function once autograd has let go of everything that it saves now and that has a recipe."""
        waiting = len(alive := list(self._alive()))

        def died(_: object) -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                tell()

        self._waited_for = [weakref.ref(packed, died) for packed in alive]

    def end_forward(self) -> None:
        """Forget where tensors came from: nobody will ask, and what the program keeps must not keep a recipe alive."""
        self._part_of.clear()
        self._watches.clear()

    def _place_copies(self) -> None:
        """Say at which node of the backward each recipe runs, and how often each of its copies is read."""
        recipes: dict[int, Recipe] = {}
        for packed in self._alive(self._num_placed):
            packed.part.recipe.uses.append((packed.node, packed.part.result))
            recipes[id(packed.part.recipe)] = packed.part.recipe
        self._num_placed = len(self._packed)
        for recipe in _with_makers(recipes):
            places = recipe.places()
            for place in places:
                self._copies.setdefault(place, []).append(recipe)
            for part in recipe.parts:
                part.recipe.uses.extend((place, part.result) for place in places)
        for copies in self._copies.values():
            if len(copies) > 1:
                copies.sort(key=_number)

    def _alive(self, first: int = 0) -> Iterator[Packed]:
        for reference in self._packed[first:]:
            packed = reference()
            if packed is not None:
                yield packed

    def _find(self, tensor: torch.Tensor) -> Part | None:
        key = storage_key(tensor)
        found = None if key is None else self._part_of.get(key)
        if found is None:
            return None
        form = None
        if tensor.dtype != found[2] or tensor.is_conj() or tensor.is_neg():
            form = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
        return Part(found[0], found[1], tensor.shape, tensor.stride(), int(tensor.storage_offset()), form)

    def _remember(self, recipe: Recipe, made: Any, held: Sequence[torch.Tensor]) -> None:
        """Take what a call made for what its recipe makes, until it is changed; know the recipes that hold a tensor."""
        results = results_of(made)
        first, recipe.num_results = recipe.num_results, recipe.num_results + len(results)
        own = {storage_key(tensor) for tensor in held}
        for index, tensor in enumerate(results, first):
            key = storage_key(tensor) if isinstance(tensor, torch.Tensor) else None
            # The last: handed through, not made.
            if key is None or key in self._part_of or tensor.is_conj() or tensor.is_neg() or key in own:
                continue
            self._part_of[key] = (recipe, index, tensor.dtype)
            watch = _Watch(tensor.untyped_storage(), self._forget)
            watch.key = key
            self._watches[key] = watch
            if self._scales is not None:
                self._scales.holds(recipe, index, tensor)
        for tensor in held:
            key = storage_key(tensor)
            if key is not None:
                self._readers.setdefault(key, []).append(weakref.ref(recipe))

    def _follow(self, number: int, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call, and repeat it with the recipe of what it changes or reads first; if it cannot, as ever."""
        written = written_tensors(func, args, kwargs)
        recipe = self._recipe_to_follow(func, args, kwargs, written)
        if recipe is None:
            for tensor in written:
                self._before_write(tensor)
            return func(*args, **kwargs)
        held = recipe.follow(number, func, args, kwargs, self._find, adds=not written)
        if self._scales is not None:
            self._scales.read(recipe)
        for tensor in written:
            self._make_readers(storage_key(tensor))
        made = func(*args, **kwargs)
        self._remember(recipe, () if written else made, held)
        return made

    def _recipe_to_follow(
        self,
        func: Any,  # noqa: ARG002 - looked at without a plan
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],  # noqa: ARG002 - as above
        written: Sequence[torch.Tensor],
    ) -> Recipe | None:
        """Return the recipe that a call can be repeated with."""
        tensors = written or [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)][:1]
        parts = [part for part in map(self._find, tensors) if part is not None]
        if not parts or len(parts) < len(tensors) or any(p.recipe is not parts[0].recipe or p.form for p in parts):
            return None
        return parts[0].recipe if parts[0].recipe.may_follow(parts if written else ()) else None

    def _forget(self, watch: Any) -> None:
        self._part_of.pop(watch.key, None)
        self._watches.pop(watch.key, None)

    def before_writes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Make what reads the storages that a call is about to change."""
        self._before_hidden_writes(func, args)
        for tensor in written_tensors(func, args, kwargs):
            self._before_write(tensor)

    def _before_hidden_writes(self, func: Any, args: Sequence[Any]) -> None:
        for statistic in hidden_statistics(func, args):
            if statistic is not None:
                self.num_touched += 1  # no version tells of it, so that a call above must not be taken for quiet
                self._before_write(statistic)

    def _before_write(self, tensor: torch.Tensor) -> None:
        """Make what reads a storage before it is changed; what is read from it later is held as it then is."""
        key = storage_key(tensor)
        if key is None:
            return
        self.num_touched += key in self._part_of or key in self._readers
        self._part_of.pop(key, None)
        self._watches.pop(key, None)
        self._make_readers(key)

    def _make_readers(self, key: int | None) -> None:
        """Make what recipes that hold a storage itself make."""
        for reference in self._readers.pop(key, ()):
            recipe = reference()
            if recipe is not None and not recipe.is_settled:
                with _Replaying(self, switches.read()):
                    self.num_recomputed += make_for_good(recipe)


@functools.cache
def _may_draw(func: Any) -> bool:
    """Return whether calls of an operator may draw random numbers: whether they do is in their arguments."""
    return torch.Tag.nondeterministic_seeded in func.tags


def stash(tensor: torch.Tensor) -> Leaf:
    """Keep a saved tensor: parameters themselves, as autograd does, which finds what other data they are given.

    Of others an alias, which does not hold the autograd graph in a circle.
    """
    is_parameter = type(tensor) is nn.Parameter or (tensor.is_leaf and tensor.requires_grad)
    return Leaf(tensor if is_parameter else alias(tensor), version_of(tensor))


def unstash(kept: Leaf) -> torch.Tensor:
    """Give a kept tensor back.

    Raises:
        RecomputeError: it was changed in place since.
    """
    if version_of(kept.tensor) != kept.version:
        raise RecomputeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" a {kept.tensor.dtype} tensor of shape {list(kept.tensor.shape)} is at version {kept.tensor._version};"
            f" expected version {kept.version}"
        )
    return kept.tensor


def _with_makers(recipes: Mapping[int, Recipe]) -> list[Recipe]:
    """Return recipes and all that they need, last call first."""
    found = dict(recipes)
    open_recipes = list(recipes.values())
    while open_recipes:
        for part in open_recipes.pop().parts:
            if id(part.recipe) not in found:
                found[id(part.recipe)] = part.recipe
                open_recipes.append(part.recipe)
    return sorted(found.values(), key=_number, reverse=True)


def _number(recipe: Recipe) -> int:
    return recipe.number
