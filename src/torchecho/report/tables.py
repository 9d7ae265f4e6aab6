"""Tables for a terminal: what a run of `bench` or `demo` found."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchecho.report.cells import cells_of, groups_of, notes_of
from torchecho.report.results import ResultRow


def results_report(rows: Sequence[ResultRow]) -> Iterator[RenderableType]:
    """Yield one table for each workload and size, with its notes; columns in which no row has anything are left out."""
    for (workload, size), group in groups_of(rows).items():
        columns, texts = cells_of(group, details=len({row.system for row in group}) == 1)
        table = _table(f"{workload}, {size}" if size else workload)
        for column in columns:
            table.add_column(column.heading, justify="right" if column.is_number else "left", no_wrap=column.is_number)
        for text in texts:
            table.add_row(*map(Text, text))
        yield Group(table, *map(Text, notes_of(group)))


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
