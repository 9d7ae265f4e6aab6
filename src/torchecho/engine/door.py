"""The doors of the eager engine: what opens a pass around the program.

A module's call opens one (`eager_call`), so does a block of code (`Block`), and while `every_module` lasts the call of
any module that no open pass takes in.
"""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchecho.capture.place import Place, find_place
from torchecho.engine import boundaries
from torchecho.engine.ahead import Example, plan_ahead
from torchecho.engine.choice import Choice
from torchecho.engine.eager import EagerEngine
from torchecho.engine.passes import Pass, begin
from torchecho.engine.planning import Surroundings
from torchecho.engine.situation import Situation
from torchecho.options import Options

Call = Callable[..., Any]


def eager_call(model: nn.Module, surroundings: Surroundings, largest: Example | None = None) -> Call:
    """Return what runs a module under the eager engine in place of its own call.

    Args:
        model: Module to run.
        surroundings: What is known of the step around it.
        largest: What it is called with on the largest batch, to be planned at once.

    Raises:
        BudgetError: no plan keeps the largest batch inside the budget.
        CaptureError: with ``strict``, the largest batch cannot be planned before it runs.
    """
    engine = EagerEngine(surroundings, model)
    if largest is not None:
        plan_ahead(engine, model, largest)
    return functools.partial(_call, begin, engine, model._call_impl)  # noqa: SLF001 - what Module.__call__ calls


@contextlib.contextmanager
def every_module(surroundings_of: Callable[[nn.Module], Surroundings | None]) -> Iterator[None]:
    """Run every module that the program calls with gradients enabled under the eager engine.

    Modules called by other modules, and those that have a pass open already, belong to the pass that is open.

    Args:
        surroundings_of: Returns what is known of the step around a module, or None to leave its steps untouched;
            called once for each.
    """
    original: Call = nn.Module.__call__
    engines: weakref.WeakKeyDictionary[nn.Module, EagerEngine] = weakref.WeakKeyDictionary()
    begin_always = functools.partial(begin, is_always=True)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        if _is_taken_in():
            return _run_inside(functools.partial(original, self), args, kwargs)
        engine = engines.get(self)
        if engine is None:
            surroundings = surroundings_of(self)
            engine = (
                _Untouched(Surroundings(Options()), self) if surroundings is None else EagerEngine(surroundings, self)
            )
            engines[self] = engine
        return _call(begin_always, engine, functools.partial(original, self), *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
        left_open = boundaries.listener()
        if isinstance(left_open, Pass):
            left_open.finish()


class _Untouched(EagerEngine):
    """Stands for a module that is left as it is: nothing of its step is planned, recorded or measured."""

    def choose(self, situation: Situation) -> Choice:  # noqa: ARG002 - the signature of what it stands for
        """Return that the step simply runs."""
        return Choice(None, records=False)


class Block:
    """A block of code that is a forward, or a forward and its backward.

    What the block starts from is not known when it begins: all its steps are taken for alike, and one that goes another
    way follows the plan by place. Steps larger than the first are planned anew.

    Args:
        engine: Holds the plans of this block.
    """

    def __init__(self, engine: EagerEngine) -> None:
        self._engine = engine
        self._pass: Pass | None = None

    def __enter__(self) -> Self:
        """Open a pass."""
        if torch.is_grad_enabled() and not _is_taken_in():
            self._pass = begin(self._engine, [])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the block; a backward that is yet to come still belongs to it."""
        opened, self._pass = self._pass, None
        if opened is not None and opened.is_open:
            opened.block_ended() if kind is None else opened.close()


_engines_of_blocks: dict[tuple[Place, Options], EagerEngine] = {}


def block(options: Options, surroundings_of: Callable[[], Surroundings]) -> Block:
    """Return the block that begins at the caller's place: each place in a program has its own plans."""
    key = (find_place("block", sys._getframe(1)), options)  # noqa: SLF001 - the place of the caller
    engine = _engines_of_blocks.get(key)
    if engine is None:
        engine = _engines_of_blocks[key] = EagerEngine(surroundings_of())
    return Block(engine)


def _call(begin_pass: Call, engine: EagerEngine, run: Call, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    if _is_taken_in():
        return _run_inside(run, args, kwargs)
    opened = begin_pass(engine, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])
    if opened is None:
        return run(*args, **kwargs)
    opened.call_begins()
    try:
        made = run(*args, **kwargs)
    except BaseException:
        opened.close()
        raise
    opened.call_ended(made)
    return made


def _run_inside(run: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a call that the open pass takes in: a backward inside it is not the one that the pass waits for."""
    current = boundaries.listener()
    if not isinstance(current, Pass) or current.is_in_call:
        return run(*args, **kwargs)
    with current.inside_a_call():
        return run(*args, **kwargs)


def _is_taken_in() -> bool:
    """Return whether an open pass takes in what is called now; one that no backward will follow any more is ended."""
    current = boundaries.listener()
    if not isinstance(current, Pass):
        return False
    if current.is_waiting():
        return True
    current.finish()
    return False
