"""What all commands share: where text goes, how JSON is written, and what an exit code means."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torchecho.errors import BudgetError, EchoError, OptionError

JsonPath = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON to FILE ('-': to stdout).")]

_PIPE_COLUMNS = 120


class ExitCode(IntEnum):
    """How a command ended."""

    DONE = 0
    DOES_NOT_FIT = 1
    WRONG_USAGE = 2
    INTERNAL_FAILURE = 3
    INTERRUPTED = 130


# The first kind that an exception is of decides; anything else is an internal failure.
_CODES = (
    (BudgetError, ExitCode.DOES_NOT_FIT),
    (OptionError, ExitCode.WRONG_USAGE),
    (typer.TyperException, ExitCode.WRONG_USAGE),
)


def make_console(json_path: str | None = None) -> Console:
    """Open the console for people: stdout, or stderr when stdout carries the JSON; in a pipe 120 columns wide."""
    to_stderr = json_path == "-"
    stream = sys.stderr if to_stderr else sys.stdout
    return Console(stderr=to_stderr, highlight=False, width=None if stream.isatty() else _PIPE_COLUMNS)


def check_file(option: str, path: str | None) -> None:
    """Find out before long work whether its results can be written.

    Args:
        option: Option that names the file.
        path: The file; None and ``"-"`` are always fine.

    Raises:
        OptionError: there is no place for the file.
    """
    if path is None or path == "-":
        return
    file = Path(path).absolute()
    if file.is_dir():
        reason = "it is a folder: name a file in it"
    elif not file.parent.is_dir():
        reason = "its folder does not exist"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = "it may not be written, by its permissions or its folder's"
    else:
        return
    raise OptionError(f"{option}: cannot write {path!r}: {reason}")


def write_json(json_path: str, document: Mapping[str, object]) -> None:
    """Write one JSON object to a file, or to stdout for ``"-"``.

    Raises:
        OptionError: the file cannot be written.
    """
    text = json.dumps(document, indent=2) + "\n"
    if json_path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(json_path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--json: cannot write {json_path!r}: {error.strerror}") from error


def run_guarded(command: Callable[[], object], program: str = "torchecho") -> int:
    """Run a command and turn whatever happens into an exit code and at most one message, without a traceback.

    An int that the command returns is its exit code. With ``TORCHECHO_DEBUG=1`` tracebacks are shown.

    Args:
        command: What to run.
        program: What was typed to run it, with the name of the command where there is one.
    """
    try:
        result = command()
    except (KeyboardInterrupt, typer.Abort):
        result = ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last guard of the program: a user meets no bare traceback
        return _complain(error, program)
    if result == ExitCode.INTERRUPTED:
        sys.stderr.write("torchecho: interrupted\n")
    return int(result) if isinstance(result, int) else ExitCode.DONE


def exit_code_of(error: Exception) -> ExitCode:
    """Return the exit code of a command that an error ends."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.INTERNAL_FAILURE)


def _complain(error: Exception, program: str) -> int:
    """Tell the user what went wrong and return the exit code for it."""
    if os.environ.get("TORCHECHO_DEBUG") == "1":
        traceback.print_exception(error)
    message = _message(error, program)
    if message:
        sys.stderr.write(f"torchecho: error: {message}\n")
    return exit_code_of(error)


def _message(error: Exception, program: str) -> str:
    """Word an error; empty when the help page that was just shown says it all."""
    if isinstance(error, EchoError):
        return str(error)
    if isinstance(error, typer.TyperException):
        text = " ".join(error.format_message().split())
        return f"{text} (see {program} --help)" if text else ""
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    return f"internal failure: {type(error).__name__}: {first_line} (TORCHECHO_DEBUG=1 shows where)"
