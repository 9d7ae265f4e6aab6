"""Results as Markdown, for a file that is committed beside the command that makes it."""

from collections.abc import Iterator, Sequence

from torchecho.report.cells import cells_of, groups_of, notes_of
from torchecho.report.results import ResultRow, Results

_NOTE = (
    "Peak: most live bytes during the step (forward, backward, optimizer step), counted exactly by the allocator, with"
    " all that was live before the step; above base: without that; less: eager's divided by it. Added: median"
    " of paired, interleaved steps in one process against the same lowering without recomputation. Same bits: loss,"
    " gradients, parameters, buffers and random state after the step equal that reference's bit for bit. Speed: median"
    " of eager's seconds divided by those of the row's step beside it; stash: what is live after the forward and was"
    " not before, the output included; error: largest of the output's and every gradient's against double precision,"
    " each as a fraction of its largest element."
)


def results_markdown(results: Results, command: str) -> str:
    """Return a run as Markdown.

    Args:
        results: The run.
        command: What a reader types to make it again.
    """
    machine = f"{results.device}, {results.threads} threads, torch {results.torch}, torchecho {results.torchecho}"
    lines = [f"`{command}`", "", machine, "", _NOTE]
    for (workload, size), rows in groups_of(results.rows).items():
        lines += ["", f"## {workload}, {size}" if size else f"## {workload}", "", *markdown_table(rows)]
    return "\n".join(lines) + "\n"


def markdown_table(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Yield the lines of one table."""
    columns, texts = cells_of(rows, details=True)
    yield _line([column.heading for column in columns])
    yield _line(["---:" if column.is_number else "---" for column in columns])
    for text in texts:
        yield _line([cell.replace("|", "\\|") for cell in text])
    notes = notes_of(rows)
    if notes:
        yield ""
        yield from (f"- {note}" for note in notes)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
