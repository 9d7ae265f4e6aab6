"""The ``torchecho`` program: one command a file, registered here."""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from torchecho.cli import bench, demo, info, run
from torchecho.cli.console import make_console, run_guarded

app = typer.Typer(name="torchecho", no_args_is_help=True, add_completion=False, rich_markup_mode="rich")

# One line a command, in the order in which help lists them.
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)
app.command("run", context_settings=run.CONTEXT_SETTINGS)(run.run)
app.command("info")(info.info)


def _show_version(wanted: bool) -> None:
    if wanted:
        make_console().print(f"torchecho {version('torchecho')}")
        raise typer.Exit


@app.callback(epilog="Example: torchecho info --json -")
def torchecho(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Fit a PyTorch training step into the memory there is, with bit-identical gradients.

    Each command has --help, and --json FILE for its figures.

    Exit codes: 0 done, 1 it does not fit, 2 wrong usage, 3 internal failure, 130 interrupted.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run the program on these arguments (default: the command line's) and return its exit code."""
    return run_guarded(
        lambda: app(args, prog_name="torchecho", standalone_mode=False), _typed(sys.argv[1:] if args is None else args)
    )


def _typed(words: Sequence[str]) -> str:
    """Return the program's name, with that of the command where one was typed."""
    commands = [command.name for command in app.registered_commands]
    return f"torchecho {words[0]}" if words and words[0] in commands else "torchecho"
