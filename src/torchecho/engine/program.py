"""Run a program in this process as the interpreter would run it alone.

Once started, the process belongs to the program: ``sys.argv``, ``sys.path`` and ``sys.modules["__main__"]`` stay what
they were made for it, as they would until the interpreter ends.
"""

import builtins
import importlib.util
import io
import os
import runpy
import sys
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from torchecho.errors import EchoError, OptionError, RecomputeError

_INTERRUPTED = 130
_OURS = str(Path(__file__).parents[1]) + os.sep
_RUNPY = ("<frozen runpy>", runpy.__file__)
_OPS = str(Path("torch", "_ops.py"))


@dataclass(frozen=True)
class Program:
    """A program and its arguments.

    Attributes:
        name: Path of a script, of a folder or archive with a ``__main__.py``, or name of a module.
        args: What ``sys.argv`` holds after the program.
        is_module: `name` is that of a module, as after ``python -m``.
    """

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    def check(self) -> None:
        """Say what is wrong before anything is run.

        Raises:
            OptionError: there is no such script.
        """
        if not self.is_module and not Path(self.name).exists():
            raise OptionError(f"run: no file {self.name!r}: give a Python script, or -m and the name of a module")


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        exit_code: What the interpreter would have ended with; 130 when the user interrupted it.
        error: What torchecho raised inside the program and the program did not catch; there was no traceback then.
        is_interrupted: The user interrupted it.
    """

    exit_code: int
    error: EchoError | None = None
    is_interrupted: bool = False


def run_program(program: Program, around: AbstractContextManager[object]) -> Outcome:
    """Run a program to its end; tell of an exception that it does not catch as the interpreter would.

    Not modelled: what the interpreter does with a keyboard interrupt after the traceback (it dies by the signal).

    Args:
        program: What to run.
        around: Is entered while it runs.
    """
    try:
        with around:
            _run(program)
    except SystemExit as end:
        return Outcome(_exit_code(end))
    except RecomputeError as error:  # mostly what autograd says of any program that changes a saved tensor
        return _uncaught(error, 1)
    except EchoError as error:
        return Outcome(1, error)
    except KeyboardInterrupt as error:
        return replace(_uncaught(error, _INTERRUPTED), is_interrupted=True)
    except BaseException as error:  # noqa: BLE001 - the program's own exceptions end here, whatever they are
        return _uncaught(error, 1)
    return Outcome(0)


def _run(program: Program) -> None:
    if program.is_module:
        _run_module(program)
        return
    path = program.name if Path(program.name).is_absolute() else str(Path.cwd()) + os.sep + program.name
    sys.argv[:] = [program.name, *program.args]
    is_script = Path(path).is_file() and not zipfile.is_zipfile(path)
    main, code = _script(path) if is_script else _main_inside(path)
    # The interpreter puts a real folder there, and a folder or archive that it was given as it is.
    _set_path(os.path.dirname(os.path.realpath(path)) if is_script else path)  # noqa: PTH120 - a text, unchanged
    sys.modules["__main__"] = main
    exec(code, main.__dict__)  # noqa: S102 - running it is what was asked


def _script(path: str) -> tuple[ModuleType, CodeType]:
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=path,
        __builtins__=builtins,
        __cached__=None,
        __annotations__={},
        __loader__=SourceFileLoader("__main__", path),
    )
    with io.open_code(path) as file:
        return main, compile(file.read(), path, "exec", dont_inherit=True)


def _main_inside(path: str) -> tuple[ModuleType, CodeType]:
    spec = PathFinder.find_spec("__main__", [path])
    if spec is None or spec.loader is None:
        raise OptionError(f"run: {path!r} has no __main__.py: give a Python script, or -m and the name of a module")
    loader: Any = spec.loader  # of folders and archives alike an inspecting one, which the latter does not declare
    return importlib.util.module_from_spec(spec), loader.get_code("__main__")


def _run_module(program: Program) -> None:
    _set_path(str(Path.cwd()))
    sys.argv[:] = ["-m", *program.args]
    spec = _spec_of(program.name)
    if spec is None:
        raise OptionError(f"run: no module named {program.name!r}: it must be importable from {Path.cwd()}")
    if spec.submodule_search_locations is not None and _spec_of(f"{program.name}.__main__") is None:
        raise OptionError(
            f"run: no module named '{program.name}.__main__': {program.name!r} is a package and cannot be run itself;"
            " give -m and the name of a module in it"
        )
    runpy.run_module(program.name, run_name="__main__", alter_sys=True)


def _spec_of(name: str) -> ModuleSpec | None:
    """Find a module; what the import of a package around it raises, other than that it is not there, is its own."""
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError) as error:
        missing = getattr(error, "name", None) or name
        if missing != name and not name.startswith(f"{missing}."):
            raise
        return None


def _set_path(folder: str) -> None:
    """Let imports of the program look in its folder first, in place of ours."""
    if not sys.flags.safe_path:
        sys.path[:1] = [folder]


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return int(end.code or 0)
    sys.stderr.write(f"{end.code}\n")
    return 1


def _uncaught(error: BaseException, exit_code: int) -> Outcome:
    for one in _with_causes(error):
        one.__traceback__ = _without_ours(one.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)
    return Outcome(exit_code)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all that its traceback will show besides, each once."""
    seen: dict[int, BaseException] = {}
    found: list[BaseException | None] = [error]
    while found:
        one = found.pop()
        if one is None or id(one) in seen:
            continue
        seen[id(one)] = one
        yield one
        found += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            found += one.exceptions


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of torchecho, of what started the program, and of the ops we called."""
    kept: list[TracebackType] = []
    is_ours = True
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        is_ours = file.startswith(_OURS) or (is_ours and (file.endswith(_OPS) or (not kept and file in _RUNPY)))
        if not is_ours:
            kept.append(trace)
        trace = trace.tb_next
    rebuilt = None
    for one in reversed(kept):
        rebuilt = TracebackType(rebuilt, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return rebuilt
