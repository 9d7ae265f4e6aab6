"""``torchecho bench``: torchecho against PyTorch's own ways, in one run."""

from pathlib import Path
from typing import Annotated

import typer

from torchecho.cli.console import JsonPath, check_file, make_console, write_json
from torchecho.cli.progress import open_progress
from torchecho.errors import OptionError


def bench(
    workloads: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help="nmt, eager, planner, rnn; none: all of them.")
    ] = None,
    size: Annotated[str, typer.Option("--size", help="full, or tiny to try it out.")] = "full",
    device: Annotated[str, typer.Option("--device", help="cpu, or cuda (nmt and eager).")] = "cpu",
    json_path: JsonPath = None,
    markdown: Annotated[
        str | None, typer.Option("--markdown", metavar="FILE", help="Write the tables as Markdown.")
    ] = None,
) -> None:
    """Measure peak, time and equal bits of each configuration, every one in a fresh process.

    Example: torchecho bench nmt --json nmt.json --markdown nmt.md
    """
    from torchecho.bench.registry import check_device, check_size, select
    from torchecho.cli.results import make_results, print_faults, print_results
    from torchecho.report.results import ResultRow

    chosen, size = select(workloads or []), check_size(size)
    device = check_device(device, chosen)
    check_file("--json", json_path)
    check_file("--markdown", markdown)
    console = make_console(json_path)
    rows: list[ResultRow] = []
    with open_progress(console) as tell:
        for workload in chosen:
            rows += workload.run(size, tell, device)
    results = make_results(rows, device)
    print_results(console, rows)
    print_faults(console, rows)
    if json_path is not None:
        write_json(json_path, results.to_dict())
    if markdown is not None:
        _write_markdown(markdown, results, _command([workload.name for workload in chosen], size, device))


def _command(names: list[str], size: str, device: str) -> str:
    options = [*([] if size == "full" else ["--size", size]), *([] if device == "cpu" else ["--device", device])]
    return " ".join(["torchecho bench", *names, *options, "--json FILE"])


def _write_markdown(path: str, results: object, command: str) -> None:
    from torchecho.report.markdown import results_markdown
    from torchecho.report.results import Results

    assert isinstance(results, Results)
    try:
        Path(path).write_text(results_markdown(results, command), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--markdown: cannot write {path!r}: {error.strerror}") from error
