"""Tables for a terminal: what a plan decided, and what a run of `bench` or `demo` found."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchecho.planner.explain import headline
from torchecho.planner.plan import Plan, Row
from torchecho.report.cells import cells_of, groups_of, notes_of
from torchecho.report.results import ResultRow
from torchecho.units import format_bytes, format_seconds

_MAX_ROWS = 12


def plan_report(plan: Plan, *, max_rows: int = _MAX_ROWS) -> RenderableType:
    """Return what `Plan.explain` says, as tables.

    Args:
        plan: Plan to show.
        max_rows: Rows of each table; the rest is added up in a last one.
    """
    parts: list[RenderableType] = [Text(line) for line in headline(plan)]
    parts.append(_plan_table("stashed for the backward", plan.stashed, max_rows))
    parts.append(_plan_table("recomputed in the backward", plan.recomputed, max_rows, seconds=True))
    parts.append(_plan_table(f"live at the peak, {plan.peak_step}", plan.at_peak, max_rows))
    parts.append(_plan_table(f"the floor, {format_bytes(plan.floor_bytes)}", plan.floor_parts, max_rows))
    if plan.kept_reasons:
        parts.append(Text("never recomputed: " + "; ".join(f"{reason} ({n})" for reason, n in plan.kept_reasons)))
    return Group(*parts)


def _plan_table(title: str, rows: Sequence[Row], max_rows: int, *, seconds: bool = False) -> Table:
    total_bytes, total_seconds = sum(row.bytes for row in rows), sum(row.seconds for row in rows)
    table = _table(f"{title}: {format_bytes(total_bytes)}" + (f", {format_seconds(total_seconds)}" if seconds else ""))
    for heading in ("bytes", "seconds", "count") if seconds else ("bytes", "count"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("what", "module", "source"):
        table.add_column(heading, overflow="fold")
    for row in rows[:max_rows]:
        cost = (format_seconds(row.seconds),) if seconds else ()
        places = (Text(text) for text in (row.target, row.module, row.source))
        table.add_row(format_bytes(row.bytes), *cost, str(row.count), *places)
    if len(rows) > max_rows:
        rest = rows[max_rows:]
        cost = (format_seconds(sum(row.seconds for row in rest)),) if seconds else ()
        count = str(sum(row.count for row in rest))
        table.add_row(format_bytes(sum(row.bytes for row in rest)), *cost, count, f"in {len(rest)} more rows", "", "")
    return table


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
