"""Let most calls of a program run unwatched while it follows a policy.

A dispatch mode sees every call below autograd, for some 5 us each, and saved-tensor hooks every saved tensor, for some
4 us each. Most calls of a program need neither. A function mode sees what the program calls of PyTorch's API, for 1.3
us each. In one step that follows a policy, a `Learner` notes these calls and in which of them the policy had nothing to
do. In the steps after it, `Quiet` lets those run with nobody watching, and has the tape and its hooks watch the others.

A step that calls anything else than was noted, or more, is watched from there on. What a quiet call saves is kept
by autograd itself, so that nothing depends on whether it does what it did: only calls that change in place what they
are given are never quiet.

Dynamo would trace through a function mode, and `torch.nn`'s own attention asks whether one is there to choose how it
computes: where there is either, everything is watched.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchecho.apply.policy import ApiCall, Outline, Policy
from torchecho.apply.recipe import version_of
from torchecho.apply.tape import Tape
from torchecho.engine import scope

_MOST_TRIES = 3
_ASK_FOR_MODES = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class Learner(TorchFunctionMode):
    """Notes the calls of a step that a tape watches all the way.

    Args:
        tape: Watches the step.
        outline: Is made known at the end.
    """

    def __init__(self, tape: Tape, outline: Outline) -> None:
        super().__init__()
        self._tape, self._outline = tape, outline
        self._calls: list[ApiCall] = []
        self._now = _now(tape)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a call and note it."""
        kwargs = kwargs or {}
        if not self._may_note():
            return func(*args, **kwargs)
        begin, num_touched, num_saved = self._now
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = [version_of(tensor) for tensor in given]
        made = func(*args, **kwargs)
        self._now = end, touched, saved = _now(self._tape)
        changes = versions != [version_of(tensor) for tensor in given] or _may_change(kwargs)
        if self._tape.follower.is_on_course:
            self._calls.append(ApiCall(func, begin, end, saved > num_saved, touched > num_touched or changes))
        return made

    def _may_note(self) -> bool:
        """Return whether the step has followed the policy so far, and done nothing outside of calls of the API.

        Once it has not, it never will have: what the tape counts only grows, and is looked at no more.
        """
        return self._tape.follower.is_on_course and self._now == _now(self._tape)

    def end(self) -> None:
        """Make the outline known: of a whole step, or of the longest beginning that some steps have in common."""
        outline = self._outline
        outline.noted = max(outline.noted, tuple(self._calls), key=len)
        if self._may_note() or outline.num_tries >= _MOST_TRIES:
            outline.settle()


class Quiet(TorchFunctionMode):
    """Has a tape watch the calls of a step that are not quiet.

    Args:
        tape: Carries the policy out.
        hooks: Of the tape; active together with it.
        outline: Of the policy.
    """

    def __init__(self, tape: Tape, hooks: scope.Hooks, outline: Outline) -> None:
        super().__init__()
        self._tape, self._hooks = tape, hooks
        self._calls, self._idle = outline.calls, outline.idle
        self._place = 0
        self._is_off_course = False
        self._around = scope.outer_hooks(), scope.num_modes()
        self._is_watching = False

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a call, watched or not."""
        kwargs = kwargs or {}
        if self._is_watching:
            return func(*args, **kwargs)
        if not self._is_off_course:
            place = self._place
            call = self._calls[place] if place < len(self._calls) else None
            if call is not None and call.func == func:
                self._place = place + 1
                if call.is_touched or (kwargs and _may_change(kwargs)):
                    return self._watched_as_planned(call, args, kwargs)
                return self._with_hooks(func, args, kwargs) if call.saves else func(*args, **kwargs)
            if call is not None and func in self._idle:
                return func(*args, **kwargs)
            self._catch_up()
            self._is_off_course = True
        if self._around == (scope.outer_hooks(), scope.num_modes()):  # nobody's block of code would end before this
            self._watch()
            return func(*args, **kwargs)
        return self._watched(func, args, kwargs)

    def _watched_as_planned(self, call: ApiCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the call that is due with the tape active."""
        follower = self._tape.follower
        follower.go_to(call.begin)
        made = self._watched(call.func, args, kwargs)
        self._is_off_course = follower.position + 1 != call.end or not follower.is_on_course
        return made

    def _watched(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._tape:
            return self._with_hooks(func, args, kwargs)

    def _with_hooks(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a call with the hooks of the tape active; where the program has made its own active, these are left."""
        if scope.outer_hooks() != self._around[0]:
            return func(*args, **kwargs)
        scope.push_hooks(self._hooks)
        try:
            return func(*args, **kwargs)
        finally:
            scope.pop_hooks()

    def _catch_up(self) -> None:
        """Let the tape know how far the program has come."""
        if self._place:
            self._tape.follower.go_to(self._calls[self._place - 1].end)

    def end(self) -> None:
        """Have everything watched from now on."""
        if not self._is_off_course:
            self._catch_up()
        if not self._is_watching:
            self._watch()

    def _watch(self) -> None:
        scope.push_hooks(self._hooks)
        scope.push_mode(self._tape)
        self._is_watching = True


def learner_for(policy: Policy, tape: Tape, model: nn.Module | None) -> Learner | None:
    """Return what learns the outline of a policy; None where it is known, or will not be."""
    outline = policy.outline
    if outline.calls or outline.num_tries >= _MOST_TRIES or model is None:
        return None
    asks = any(isinstance(module, _ASK_FOR_MODES) for module in model.modules())
    outline.num_tries = _MOST_TRIES if asks else outline.num_tries + 1
    return None if asks else Learner(tape, outline)


def _now(tape: Tape) -> tuple[int, int, int]:
    """Return how many calls a tape has seen, and how many calls and saved tensors had to do with a recipe."""
    return tape.follower.position + 1, tape.num_touched, tape.num_saved


def _may_change(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call is asked to change something that it is given."""
    return bool(kwargs.get("inplace")) or kwargs.get("out") is not None
