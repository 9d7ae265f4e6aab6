"""The options that every door takes: what they are called, what they may hold, and what is wrong with a bad one."""

import difflib
import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from torchecho.errors import OptionError
from torchecho.units import parse_bytes

Engine: TypeAlias = Literal["auto", "compile", "eager"]
Lowering: TypeAlias = Literal["auto", "inductor", "eager"]

DEFAULT_MAX_SLOWDOWN = 0.05
_COSTS = ("auto", "roofline", "measured")
_OF_OPTIMIZE = ("largest", "dynamic")
_BUDGET_FORMS = "a byte count such as '8GiB', a fraction of the untouched peak in (0, 1], or 'auto'"


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. ``parse_options`` makes checked ones.

    Attributes:
        memory_budget: Upper bound on the peak of the step: an int counts bytes, a float is a fraction of the untouched
            step's peak, ``"auto"`` is what the device has; None when no bound was asked for.
        max_slowdown: Largest added step time to accept, as a fraction; None when the user did not say.
        engine: How the step is captured and run.
        lowering: How the compile engine runs the planned graphs.
        cost: Where op seconds come from: ``"auto"`` (measured where tensors are real, else roofline), ``"roofline"``,
            ``"measured"``, or the path of a table.
        strict: Raise instead of falling back to the untouched step.
        optimizer: A torch optimizer whose state counts in the footprint.
    """

    memory_budget: int | float | Literal["auto"] | None = None
    max_slowdown: float | None = None
    engine: Engine = "auto"
    lowering: Lowering = "auto"
    cost: str = "auto"
    strict: bool = False
    optimizer: object | None = None

    @property
    def effective_max_slowdown(self) -> float | None:
        """Slowdown to plan with: what was asked, 0.05 when nothing at all was asked, None for no limit."""
        if self.max_slowdown is None and self.memory_budget is None:
            return DEFAULT_MAX_SLOWDOWN
        return self.max_slowdown


def parse_options(given: Mapping[str, object]) -> Options:
    """Check the options that a user gave by name; absent ones keep their defaults.

    Raises:
        OptionError: a name is unknown, or a value has the wrong type or is out of range.
    """
    known = [f.name for f in fields(Options)]
    for name in given:
        if name in _OF_OPTIMIZE:
            raise OptionError(
                f"{name} is an argument of torchecho.optimize(model, {name}=...) alone: leave it out here"
            )
        if name not in known:
            every = [*known, *_OF_OPTIMIZE]
            raise OptionError(
                f"unknown option {name!r}{nearest(name, every)}"
                f" (options: {', '.join(known)}; of optimize alone: {', '.join(_OF_OPTIMIZE)})"
            )
    engine = given.get("engine", "auto")
    lowering = given.get("lowering", "auto")
    return Options(
        memory_budget=_parse_budget(given.get("memory_budget")),
        max_slowdown=_parse_slowdown(given.get("max_slowdown")),
        engine=cast("Engine", _parse_choice("engine", engine, get_args(Engine))),
        lowering=cast("Lowering", _parse_choice("lowering", lowering, get_args(Lowering))),
        cost=_parse_cost(given.get("cost", "auto")),
        strict=_parse_strict(given.get("strict", False)),
        optimizer=_parse_optimizer(given.get("optimizer")),
    )


def parse_dynamic(dynamic: object) -> bool | None:
    """Check what a user gave as `dynamic`.

    Raises:
        OptionError: it is neither a bool nor None.
    """
    if dynamic is not None and not isinstance(dynamic, bool):
        raise OptionError(f"dynamic must be True, False, or None to leave it to torch; got {_describe(dynamic)}")
    return dynamic


def check_for_eager(options: Options, dynamic: bool | None = None) -> None:  # noqa: FBT001 - torch.compile's own argument
    """Refuse what only the compile engine has, for a step that the eager engine runs.

    Raises:
        OptionError: there is such an option.
    """
    chosen = {"lowering": None if options.lowering == "auto" else options.lowering, "dynamic": dynamic}
    for name, value in chosen.items():
        if value is not None:
            raise OptionError(
                f"{name}={value!r} is of the compile engine, and the eager engine runs this step:"
                " leave it out, or give a module to torchecho.optimize(model, engine='compile')"
            )


def nearest(word: object, valid: list[str] | tuple[str, ...]) -> str:
    """Return ``", did you mean 'x'?"`` for the valid word that is nearest to a mistyped one, or nothing."""
    matches = difflib.get_close_matches(str(word), valid, n=1)
    return f", did you mean {matches[0]!r}?" if matches else ""


def _parse_budget(budget: object) -> int | float | Literal["auto"] | None:
    if budget is None:
        return None
    if isinstance(budget, str):
        return _parse_budget_text(budget)
    if _is_number(budget, numbers.Integral):
        return _check_bytes(int(cast("int", budget)), budget)
    if _is_number(budget, numbers.Real):
        return _check_fraction(float(cast("float", budget)), budget)
    raise OptionError(f"memory_budget must be {_BUDGET_FORMS}; got {_describe(budget)}")


def _parse_budget_text(text: str) -> int | float | Literal["auto"]:
    """Read a budget from text; a bare number with a point, as typed on a command line, is a fraction."""
    if text.strip().lower() == "auto":
        return "auto"
    if "." in text and text.strip().replace(".", "", 1).isdecimal():
        return _check_fraction(float(text), text)
    try:
        budget_bytes = parse_bytes(text)
    except OptionError as error:
        raise OptionError(f"memory_budget: {error}, a fraction in (0, 1], or 'auto'") from None
    return _check_bytes(budget_bytes, text)


def _check_bytes(budget_bytes: int, asked: object) -> int:
    if budget_bytes <= 0:
        raise OptionError(f"memory_budget must be more than 0 bytes; got {asked!r}")
    return budget_bytes


def _check_fraction(fraction: float, asked: object) -> float:
    if not 0 < fraction <= 1:
        raise OptionError(
            f"memory_budget as a float is a fraction of the untouched peak in (0, 1]; got {asked!r}"
            " (write bytes as an int or with a unit, such as '8GiB')"
        )
    return fraction


def _parse_slowdown(slowdown: object) -> float | None:
    if slowdown is None:
        return None
    if not _is_number(slowdown, numbers.Real):
        raise OptionError(f"max_slowdown must be a number, such as 0.05 for 5 %; got {_describe(slowdown)}")
    fraction = float(cast("float", slowdown))
    if math.isnan(fraction) or fraction < 0:
        raise OptionError(f"max_slowdown must be 0 or more; got {slowdown!r}")
    return fraction


def _parse_choice(option: str, chosen: object, valid: tuple[str, ...]) -> str:
    if isinstance(chosen, str) and chosen in valid:
        return chosen
    raise OptionError(f"{option} must be one of {_quote(valid)}; got {_describe(chosen)}{nearest(chosen, valid)}")


def _parse_cost(cost: object) -> str:
    if isinstance(cost, str) and cost in _COSTS:
        return cost
    if isinstance(cost, (str, os.PathLike)) and Path(cost).is_file():
        return os.fspath(cost)
    raise OptionError(
        f"cost must be one of {_quote(_COSTS)} or the path of a table that exists;"
        f" got {_describe(cost)}{nearest(cost, _COSTS)}"
    )


def _parse_strict(strict: object) -> bool:
    if not isinstance(strict, bool):
        raise OptionError(f"strict must be True or False; got {_describe(strict)}")
    return strict


def _parse_optimizer(optimizer: object) -> object | None:
    # Told by its attribute, so that this module needs no torch.
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "param_groups")):
        raise OptionError(f"optimizer must be a torch optimizer; got {_describe(optimizer)}")
    return optimizer


def _is_number(candidate: object, kind: type) -> bool:
    return isinstance(candidate, kind) and not isinstance(candidate, bool)


def _describe(found: object) -> str:
    """Name a wrong value on one line: itself where it is short, and its type."""
    text = repr(found)
    shown = text if len(text) <= 60 and "\n" not in text else "an object"
    return f"{shown} of type {type(found).__name__}"


def _quote(words: tuple[str, ...]) -> str:
    return ", ".join(repr(word) for word in words)
