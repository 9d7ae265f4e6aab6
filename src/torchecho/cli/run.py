"""``torchecho run``: an unmodified training program under a memory budget."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import typer

from torchecho.cli.console import check_file, exit_code_of, write_json
from torchecho.cli.watch import watched
from torchecho.errors import EchoError, OptionError
from torchecho.options import Options, parse_options

if TYPE_CHECKING:
    from torchecho.engine.program import Outcome
    from torchecho.engine.trainer import Trainer
    from torchecho.report.run import RunResult

# What follows the program is the program's own.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def run(
    program: Annotated[list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]...", show_default=False)] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.")] = False,
    memory_budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="As '2GiB', a fraction of the untouched step's peak, or auto.")
    ] = None,
    max_slowdown: Annotated[
        float | None, typer.Option(metavar="FRACTION", help="Largest added step time; 0.05 without a budget.")
    ] = None,
    engine: Annotated[str, typer.Option(help="auto, eager, or compile.")] = "auto",
    strict: Annotated[bool, typer.Option("--strict", help="Stop where a step would run untouched.")] = False,
    json_path: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON to FILE.")] = None,
) -> int:
    """Run an unmodified training program under a memory budget.

    The program prints what it always prints and ends with its own exit code; a summary follows on standard error.

    Example: torchecho run --memory-budget 0.5 train.py --epochs 3
    """
    given = {"memory_budget": memory_budget, "max_slowdown": max_slowdown, "engine": engine, "strict": strict}
    options = parse_options(given)
    if not program:
        raise OptionError("run: no program: give a Python script, or -m and the name of a module")
    if json_path == "-":
        raise OptionError("run: --json takes a file here: standard output belongs to the program")
    check_file("--json", json_path)
    return _run(program, is_module, options, json_path)


def _run(words: Sequence[str], is_module: bool, options: Options, json_path: str | None) -> int:
    from torchecho.engine.imports import from_import_of
    from torchecho.engine.program import Program, run_program

    program = Program(words[0], tuple(words[1:]), is_module)
    program.check()

    trainers: list[Trainer] = []
    refusals: list[EchoError] = []
    outcome = run_program(program, from_import_of("torch", lambda: watched(options, trainers, refusals.append)))
    outcome = _with_refusal(outcome, refusals)
    with contextlib.suppress(OSError, ValueError):  # the program may have closed it
        sys.stdout.flush()
    if not _is_half_imported("torch") and _is_first_rank():
        _report(_result(words, outcome, trainers), json_path, is_shown=outcome.error is None)
    if outcome.error is not None:
        raise outcome.error
    return outcome.exit_code


def _with_refusal(outcome: "Outcome", refusals: Sequence[EchoError]) -> "Outcome":
    """Let an error of ours count that the program has caught: not all of it ran as was asked."""
    if outcome.error is not None or outcome.is_interrupted or not refusals:
        return outcome
    return dataclasses.replace(outcome, error=refusals[0])


def _is_half_imported(package: str) -> bool:
    """Return whether an import of a package ended in its middle, as by an interrupt; another one would fail."""
    return package not in sys.modules and any(name.startswith(f"{package}.") for name in sys.modules)


def _is_first_rank() -> bool:
    from torchecho.engine.ranks import own_rank

    rank = own_rank()
    return (rank if rank is not None else int(os.environ.get("RANK", "0"))) == 0


def _result(words: Sequence[str], outcome: "Outcome", trainers: "list[Trainer]") -> "RunResult":
    import torch

    from torchecho.api import plans
    from torchecho.cli.info import name_device
    from torchecho.report.run import RunResult

    return RunResult(
        torchecho=version("torchecho"),
        torch=torch.__version__,
        device=name_device(),
        threads=torch.get_num_threads(),
        program=tuple(words),
        exit_code=outcome.exit_code if outcome.error is None else exit_code_of(outcome.error),
        is_interrupted=outcome.is_interrupted,
        error=None if outcome.error is None else str(outcome.error),
        steps=sum(trainer.num_steps for trainer in trainers),
        plans=tuple(plans()),
    )


def _report(result: "RunResult", json_path: str | None, *, is_shown: bool) -> None:
    from torchecho.report.run import run_summary

    if is_shown:
        sys.stderr.writelines(f"{line}\n" for line in run_summary(result))
    if json_path is not None:
        write_json(json_path, result.to_dict())
