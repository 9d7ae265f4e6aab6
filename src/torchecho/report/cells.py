"""The columns of a results table as text, shared by the terminal and Markdown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchecho.report.results import ResultRow
from torchecho.units import format_bytes, format_overhead, format_seconds


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its heading and the text of a row's cell, None when the row has none.

    Attributes:
        is_number: Whether it lines up on the right.
        is_detail: Whether a narrow table does without it.
        tells_batches: Whether a narrow table does without it where all batches are the same.
    """

    heading: str
    cell: Callable[[ResultRow, ResultRow | None], str | None]
    is_number: bool = True
    is_detail: bool = False
    tells_batches: bool = False


def _bytes(num_bytes: float | None) -> str | None:
    return None if num_bytes is None else format_bytes(num_bytes)


def _overhead(fraction: float | None) -> str | None:
    return None if fraction is None else format_overhead(fraction)


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else format_seconds(seconds)


def _ratio(above: float | None, below: float | None) -> str | None:
    return f"{above / below:.2f}x" if above and below else None


def _rate(row: ResultRow) -> str | None:
    return None if row.samples_per_second is None else f"{row.samples_per_second:.1f}"


def _equal(row: ResultRow) -> str | None:
    return None if row.grads_equal is None else ("yes" if row.grads_equal else "NO")


def _figure(name: str, form: Callable[[float], str]) -> Callable[[ResultRow, ResultRow | None], str | None]:
    """Return the cell of a figure that only some workloads measure."""
    return lambda row, _: form(row.figures[name]) if name in row.figures else None


def _what(row: ResultRow) -> str:
    return f"{row.system} {row.setting}".strip()


# A cell sees its own row and the eager one of the same workload and size, if the run has it.
COLUMNS = (
    Column("system, setting", lambda row, _: _what(row), is_number=False),
    Column("lowering", lambda row, _: row.lowering, is_number=False, is_detail=True),
    Column("batch", lambda row, _: None if row.batch is None else str(row.batch), tells_batches=True),
    Column("peak", lambda row, _: _bytes(row.peak_bytes)),
    Column("less", lambda row, eager: _ratio(eager.peak_bytes, row.peak_bytes) if eager else None),
    Column("above base", lambda row, _: _bytes(row.above_base_bytes)),
    Column(
        "less",
        lambda row, eager: _ratio(eager.above_base_bytes, row.above_base_bytes) if eager else None,
        is_detail=True,
    ),
    Column("predicted", lambda row, _: _bytes(row.predicted_peak_bytes)),
    Column("step", lambda row, _: _seconds(row.seconds_median)),
    Column("samples/s", lambda row, _: _rate(row), tells_batches=True),
    Column("speed", _figure("speedup", "{:.2f}x".format)),
    Column("stash", _figure("stash_bytes", format_bytes)),
    Column("T·B·H a layer", _figure("stash_units", "{:.2f}".format)),
    Column("error", _figure("error", "{:.1e}".format)),
    Column("added", lambda row, _: _overhead(row.overhead_measured)),
    Column("foreseen", lambda row, _: _overhead(row.overhead_predicted)),
    Column("bound", lambda row, _: _overhead(row.overhead_bound), is_detail=True),
    Column("planning", lambda row, _: _seconds(row.planning_seconds), is_detail=True),
    Column("compile", lambda row, _: _seconds(row.compile_seconds), is_detail=True),
    Column("first step", lambda row, _: _seconds(row.first_seconds), is_detail=True),
    Column("same bits", lambda row, _: _equal(row)),
    Column("loss", lambda row, _: None if row.loss is None else f"{row.loss:.6f}", is_detail=True),
)


def cells_of(rows: Sequence[ResultRow], *, details: bool) -> tuple[list[Column], list[list[str]]]:
    """Return the columns in which at least one row has something, and the text of every row in them.

    Args:
        rows: Rows of one workload and size.
        details: Whether columns that a narrow table can do without are wanted.
    """
    eager = next((row for row in rows if row.system == "eager"), None)
    batches = {row.batch for row in rows}
    columns = [c for c in COLUMNS if details or not (c.is_detail or (c.tells_batches and len(batches) == 1))]
    texts = [[column.cell(row, eager) for column in columns] for row in rows]
    used = [index for index in range(len(columns)) if any(text[index] for text in texts)]
    return [columns[index] for index in used], [[text[index] or "" for index in used] for text in texts]


def notes_of(rows: Sequence[ResultRow]) -> list[str]:
    """Return the notes of rows, each with the row that it is about."""
    return [f"{_what(row)}: {row.note}" for row in rows if row.note]


def groups_of(rows: Sequence[ResultRow]) -> dict[tuple[str, str], list[ResultRow]]:
    """Group rows by workload and size, in the order in which they come."""
    groups: dict[tuple[str, str], list[ResultRow]] = {}
    for row in rows:
        groups.setdefault((row.workload, row.size), []).append(row)
    return groups
