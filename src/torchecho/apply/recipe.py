"""Recipes: how to make a feature map again from what is still there.

A recipe holds a call and, for each tensor that it read, either the recipe that makes it or the tensor itself. Replaying
happens below autograd and outside autocast, with gradients enabled as in the forward, because kernels choose what they
compute by that (a recurrent layer of oneDNN makes its workspace only then).
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchecho.apply import switches
from torchecho.apply.overlap import Region, may_overlap
from torchecho.capture.schema import without_statistics
from torchecho.capture.storage import alias, storage_key
from torchecho.errors import RecomputeError


class Leaf(NamedTuple):
    """A tensor that a recipe holds, and the version at which it was read.

    Attributes:
        origin: Weak reference to what the tensor is an alias of, where the program may give that other data: the
            alias shares its version, but then no longer what lies there.
    """

    tensor: torch.Tensor
    version: int
    origin: "weakref.ref[torch.Tensor] | None" = None

    @property
    def has_changed(self) -> bool:
        """Whether what lies there was changed in place since."""
        if version_of(self.tensor) == self.version:
            return False
        origin = None if self.origin is None else self.origin()
        return origin is None or storage_key(origin) == storage_key(self.tensor)


class Part(NamedTuple):
    """How a tensor looks at a storage that a recipe makes: as `shape`, `strides`, `offset` of one of its results.

    Attributes:
        form: Its dtype, and whether it is read as the conjugate and as the negative of what lies there; None for a
            tensor of the same dtype that is read as it is.
    """

    recipe: "Recipe"
    result: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    form: tuple[torch.dtype, bool, bool] | None = None

    @property
    def region(self) -> Region:
        """What it takes of its storage."""
        return Region(self.shape, self.strides, self.offset)

    def get(self) -> torch.Tensor:
        """Return the tensor, looking at the newest copy of what the recipe made."""
        assert self.recipe.made is not None, "recipes run in the order of the calls they stand for"
        return _part(self.recipe.made[self.result], self)


class Own(NamedTuple):
    """How a tensor looks at a storage that the recipe itself makes."""

    result: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    form: tuple[torch.dtype, bool, bool] | None = None


class Packed:
    """A saved tensor that will be made again, and the number of the autograd node that it is for.

    Attributes:
        tensor: The tensor, once it was asked for by a backward that is the last: a custom function or a hook may ask
            again, and the node lets go of all this when it has run.
    """

    __slots__ = ("__weakref__", "node", "part", "tensor")

    def __init__(self, node: int, part: Part) -> None:
        self.node, self.part = node, part
        self.tensor: torch.Tensor | None = None


class FollowUp(NamedTuple):
    """A call that changes in place, or reads, what a recipe has made so far.

    Attributes:
        adds: What it makes are results of the recipe.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    adds: bool


class Recipe:
    """One call that can be made again, and its follow-ups.

    Attributes:
        number: Its place among the calls of the forward, that of the last follow-up: recipes run in this order.
        originals: Weak references to what the call made in the forward, with versions, where that is wanted.
        parts: What it reads of other recipes.
        follow_ups: The calls to make after the first, in order.
        is_read: Other recipes read what it makes: a follow-up would come too late for them.
        saved: What autograd has saved of it.
        num_results: How many results it makes so far.
        window: How far apart two uses of one copy may be, in autograd nodes; 0 for no limit.
        uses: For each use still to be placed the autograd node that it is for, and the result.
        made: The results of the newest copy; those that will not be read any more are None.
        readers_left: How often each result of the newest copy will still be read.
        readers: The same for each copy to come, by the autograd node before which it is made.
        serial: Its number among the recipes of a step that is weighed.
        switches: How the switches that kernels look at were, where that is not as when the step began.
    """

    __slots__ = (
        "__weakref__",
        "args",
        "follow_ups",
        "func",
        "is_read",
        "kwargs",
        "made",
        "num_results",
        "number",
        "originals",
        "parts",
        "readers",
        "readers_left",
        "saved",
        "serial",
        "switches",
        "uses",
        "window",
    )

    def __init__(
        self, number: int, window: int, func: Callable[..., Any], switched: switches.Switches | None = None
    ) -> None:
        self.number, self.window, self.func, self.switches = number, window, func, switched
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.parts: list[Part] = []
        self.follow_ups: list[FollowUp] = []
        self.is_read = False
        self.saved: list[weakref.ref[Packed]] = []
        self.originals: tuple[tuple[weakref.ref[torch.Tensor], int], ...] = ()
        self.num_results = 0
        self.uses: list[tuple[int, int]] = []
        self.made: list[Any] | None = None
        self.readers_left: dict[int, int] = {}
        self.readers: dict[int, dict[int, int]] = {}
        self.serial = 0

    def hold(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], find: Callable[[torch.Tensor], Part | None]
    ) -> list[torch.Tensor]:
        """Keep what a call read: parts of other recipes where there are some, else the tensors themselves.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of it.
            find: Returns the part of another recipe that makes a tensor; None where there is none.

        Returns:
            The tensors that are kept themselves.
        """
        held: list[torch.Tensor] = []
        self.args = tuple([_keep(value, find, self, held) for value in without_statistics(self.func, args)])
        if kwargs:
            self.kwargs = {name: _keep(value, find, self, held) for name, value in kwargs.items()}
        return held

    def may_follow(self, changed: Sequence[Part]) -> bool:
        """Return whether one more call can be made after those that it has; `changed` is what the call changes."""
        if self.is_settled or self.is_read:
            return False
        saved = [packed.part for packed in (reference() for reference in self.saved) if packed is not None]
        return not any(
            one.result == other.result and (other.form is not None or may_overlap(one.region, other.region))
            for one in changed
            for other in saved
        )

    def follow(
        self,
        number: int,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        find: Callable[[torch.Tensor], Part | None],
        *,
        adds: bool,
    ) -> list[torch.Tensor]:
        """Add a follow-up, the call of a number; what is not said here is as in `hold`, or in `FollowUp`."""
        held: list[torch.Tensor] = []
        kept_args = tuple([_keep(value, find, self, held) for value in without_statistics(func, args)])
        kept_kwargs = {name: _keep(value, find, self, held) for name, value in kwargs.items()}
        self.follow_ups.append(FollowUp(func, kept_args, kept_kwargs, adds))
        self.number, self.originals = number, ()
        return held

    @property
    def is_settled(self) -> bool:
        """Whether what it was made of is gone: there will be no other copy."""
        return self.func is _settled

    def has(self, index: int) -> bool:
        """Return whether there is a copy of a result."""
        return self.made is not None and self.made[index] is not None

    def places(self) -> list[int]:
        """Return the autograd nodes at which to run; note how often each copy will be read."""
        uses = sorted(self.uses, reverse=True)
        self.uses.clear()
        places: list[int] = []
        if self.is_settled:
            return places
        for i, (number, index) in enumerate(uses):
            if i == 0 or (self.window and uses[i - 1][0] - number > self.window):
                places.append(number)
            expected = self.readers.setdefault(places[-1], {})
            expected[index] = expected.get(index, 0) + 1
        return places

    def expect(self, readers: Mapping[int, int]) -> None:
        """Count what will be read of the next copy, beside what others still wait for."""
        waiting = self.readers_left
        self.readers_left = {i: waiting.get(i, 0) + readers.get(i, 0) for i in (*waiting, *readers)}

    def operands(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the call; whatever it reads must have a copy."""
        return [_give(value) for value in self.args], {name: _give(value) for name, value in self.kwargs.items()}

    def run(self) -> None:
        """Make a new copy of the results that will be read; whatever it reads must have one."""
        if self.switches is None:
            self._run()
            return
        around = switches.read()
        switches.put(self.switches)
        try:
            self._run()
        finally:
            switches.put(around)

    def _run(self) -> None:
        args, kwargs = self.operands()
        made = results_of(self.func(*args, **kwargs))
        for one in self.follow_ups:
            added = one.func(*[_give(v, made) for v in one.args], **{k: _give(v, made) for k, v in one.kwargs.items()})
            if one.adds:
                made = (*made, *results_of(added))
        self.made = [result if i in self.readers_left else None for i, result in enumerate(made)]
        for part in self.parts:
            part.recipe.read_once(part.result)

    def read_once(self, index: int) -> None:
        """Drop a result of the newest copy when it has been read for the last time."""
        left = self.readers_left.pop(index, 0) - 1
        if left > 0:
            self.readers_left[index] = left
        elif self.made is not None:
            self.made[index] = None

    def know_originals(self, made: Sequence[Any]) -> None:
        """Remember what the call made in the forward, for as long as the program holds it."""
        if all(isinstance(result, torch.Tensor) for result in made):
            self.originals = tuple([(weakref.ref(tensor), version_of(tensor)) for tensor in made])

    def take_originals(self) -> bool:
        """Hold what the call made in the forward in place of what it is made of, if all of it is still there unchanged.

        Returns:
            Whether it is.
        """
        alive = [tensor for reference, _ in self.originals if (tensor := reference()) is not None]
        if not alive or self.is_settled or list(map(version_of, alive)) != [version for _, version in self.originals]:
            return False
        self.func, self.args = results_of, (tuple([Leaf(alias(tensor), version_of(tensor)) for tensor in alive]),)
        self.kwargs, self.parts, self.originals = {}, [], ()
        return True

    def part_from_originals(self) -> None:
        """Hold copies of what `take_originals` took."""
        (held,) = self.args
        with torch.no_grad():
            copies = [one.tensor.clone() for one in held]
        self.args = (tuple([Leaf(copy, version_of(copy)) for copy in copies]),)

    def start_anew(self) -> None:
        """Drop all copies, made and to come, unless there will be no other."""
        if not self.is_settled:
            self.made = None
            self.uses, self.readers, self.readers_left = [], {}, {}

    def settle(self) -> None:
        """Let go of what the newest copy was made of: there will be no other."""
        self.func = _settled
        self.args, self.kwargs, self.parts, self.follow_ups = (), {}, [], []


def _settled(*_: object, **__: object) -> Any:
    raise RecomputeError(
        "a feature map was asked for again after its last use: call backward(retain_graph=True) to use the graph twice"
    )


def results_of(made: Any) -> Sequence[Any]:
    """Return what a call made as a sequence of results."""
    return made if isinstance(made, (tuple, list)) else (made,)


def _part(whole: torch.Tensor, look: Part | Own) -> torch.Tensor:
    """Return a tensor that looks at the storage of a result as another did."""
    if look.form is not None:
        return _in_form(whole, look, *look.form)
    if whole.shape == look.shape and whole.stride() == look.strides and whole.storage_offset() == look.offset:
        return whole
    return whole.as_strided(look.shape, look.strides, look.offset)


def _in_form(whole: torch.Tensor, look: Part | Own, dtype: torch.dtype, is_conj: bool, is_neg: bool) -> torch.Tensor:  # noqa: FBT001 - the elements of `form`
    unit_bytes = max(dtype.itemsize, whole.element_size())
    num_bytes = whole.untyped_storage().nbytes() // unit_bytes * unit_bytes
    flat = whole.as_strided((num_bytes // whole.element_size(),), (1,), 0)
    made = flat.view(dtype).as_strided(look.shape, look.strides, look.offset)
    made = made.conj() if is_conj else made
    return torch._neg_view(made) if is_neg else made  # private: no public way to make such a view


def _keep(value: Any, find: Callable[[torch.Tensor], Part | None], recipe: Recipe, held: list[torch.Tensor]) -> Any:
    """Return what a recipe holds for what a call was given; note the parts of other recipes and the tensors in it."""
    if isinstance(value, torch.Tensor):
        part = find(value)
        if part is None:
            held.append(value)
            return leaf(value)
        if part.recipe is recipe:
            return Own(*part[1:])
        part.recipe.is_read = True
        recipe.parts.append(part)
        return part
    if isinstance(value, (list, tuple)):
        return tuple([_keep(item, find, recipe, held) for item in value])
    return value


def leaf(tensor: torch.Tensor) -> Leaf:
    """Return what holds a tensor that a call inside a dispatch mode was given: an alias outside the autograd graph.

    It stays where it is when the program gives the tensor other data. Modes run below the layer that lets aliases
    share a version, so that the alias is made with that layer let in.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return Leaf(tensor.detach(), version_of(tensor), weakref.ref(tensor) if tensor.is_leaf else None)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; of inference tensors torch does not know."""
    return 0 if tensor.is_inference() else tensor._version


def _give(value: Any, made: Sequence[Any] = ()) -> Any:
    """Return what a call is given for what its recipe holds; `made` are the results of the recipe so far."""
    if type(value) is Part:
        return value.get()
    if type(value) is Leaf:
        if value.has_changed:
            raise RecomputeError(
                f"a tensor of shape {tuple(value.tensor.shape)} that recomputation needs was changed in place between"
                f" forward and backward (version {value.tensor._version}, expected {value.version}): call backward()"
                " before changing it, or change a clone"
            )
        return value.tensor
    if type(value) is Own:
        return _part(made[value.result], value)
    return [_give(item, made) for item in value] if type(value) is tuple else value
