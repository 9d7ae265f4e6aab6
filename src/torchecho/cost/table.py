"""The measured table: seconds and workspace by op signature, kept as JSON beside other processes' measurements."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torchecho.cache import cache_folder, locked, read_json, write_json
from torchecho.cost.model import CostModel
from torchecho.errors import OptionError
from torchecho.ir.graph import Op, TrainingGraph

_logger = logging.getLogger("torchecho")
_KIND = "cost-table/2"
_DAMAGES = (KeyError, TypeError, ValueError, AttributeError)  # what reading the entries of a damaged table raises


@dataclass(frozen=True, slots=True)
class OpCost:
    """Measured cost of one signature: seconds of a run, and bytes that it allocates inside and frees."""

    seconds: float
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class CostTable:
    """Cost model: the measured cost of an op's signature, else what another model says.

    Attributes:
        device: Device that the costs were measured on.
        fallback: Answers for ops without a measured cost.
        entries: Cost by signature; None for an op that was tried and cannot run alone.
    """

    device: str
    fallback: CostModel
    entries: Mapping[str, OpCost | None] = field(default_factory=dict)

    def op_seconds(self, op: Op, graph: TrainingGraph) -> float:
        """Return the measured seconds of the op, else the other model's; 0 for views."""
        if op.is_view:
            return 0.0
        cost = self.entries.get(op.signature)
        return self.fallback.op_seconds(op, graph) if cost is None else cost.seconds

    def op_workspace_bytes(self, op: Op, graph: TrainingGraph) -> int:
        """Return the measured workspace of the op, else the other model's; 0 for views."""
        if op.is_view:
            return 0
        cost = self.entries.get(op.signature)
        return self.fallback.op_workspace_bytes(op, graph) if cost is None else cost.workspace_bytes

    def unmeasured(self, graph: TrainingGraph) -> tuple[int, ...]:
        """Return one op for each signature that was never tried, in the order of the graph."""
        first: dict[str, int] = {}
        for index in graph.kernels:
            signature = graph.ops[index].signature
            if signature and signature not in self.entries:
                first.setdefault(signature, index)
        return tuple(first.values())

    def with_entries(self, entries: Mapping[str, OpCost | None]) -> Self:
        """Return a table that has these entries too; they win over those of the same signature."""
        return type(self)(self.device, self.fallback, {**self.entries, **entries})


def load_table(path: Path, device: str, fallback: CostModel) -> CostTable:
    """Read the table of a device; empty when there is none.

    A file that is damaged, of another version, or of another device is ignored with one logged warning.
    """
    body = read_json(path, _KIND)
    return CostTable(device, fallback, {} if body is None else _entries(body, device, path))


def read_named(path: Path, device: str) -> dict[str, OpCost | None]:
    """Read the entries of a table that the user named for a device; the file stays as it is.

    Raises:
        OptionError: there is no such file, it is no cost table, or it was measured on another device.
    """
    then = f"name a table of this device, as kept in {table_folder()}, or leave cost out to have ops measured"
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OptionError(f"cost: there is no file {str(path)!r}: {then}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"cost: {str(path)!r} is no cost table, it cannot be read as JSON: {then}") from error
    found = body.get("torchecho") if isinstance(body, dict) else None
    if found != _KIND:
        raise OptionError(f"cost: {str(path)!r} is no cost table, its kind is {found!r}, not {_KIND!r}: {then}")
    if body.get("device") != device:
        raise OptionError(f"cost: {str(path)!r} was measured on {body.get('device')!r}, not on {device!r}: {then}")
    try:
        return _costs(body)
    except _DAMAGES as error:
        raise OptionError(f"cost: the table {str(path)!r} is damaged ({error!r}): {then}") from error


def table_folder() -> Path:
    """Return the folder of the tables that are kept, one for each device."""
    return cache_folder() / "costs"


def save_table(table: CostTable, path: Path) -> CostTable:
    """Merge the table into the file and return the merged one.

    Where both have a signature the table wins, so that a new measurement replaces an old one. The file is locked
    meanwhile: of two processes that save at once, both contribute. A folder that cannot be written costs a logged
    warning; the table is then returned as it is.
    """
    try:
        with locked(path):
            merged = load_table(path, table.device, table.fallback).with_entries(table.entries)
            write_json(path, _KIND, {"device": table.device, "entries": _rows(merged.entries)})
    except OSError as error:
        _logger.warning("cannot keep the measured costs in %s: %s", path, error)
        return table
    return merged


def _rows(entries: Mapping[str, OpCost | None]) -> dict[str, list[float] | None]:
    return {key: None if cost is None else [cost.seconds, cost.workspace_bytes] for key, cost in entries.items()}


def _entries(body: dict[str, Any], device: str, path: Path) -> dict[str, OpCost | None]:
    if body.get("device") != device:
        _logger.warning("ignoring the costs in %s: measured on %r, not on %r", path, body.get("device"), device)
        return {}
    try:
        return _costs(body)
    except _DAMAGES as error:
        _logger.warning("ignoring the damaged costs in %s: %r", path, error)
        return {}


def _costs(body: dict[str, Any]) -> dict[str, OpCost | None]:
    return {str(key): None if row is None else _cost(row) for key, row in body["entries"].items()}


def _cost(row: list[float]) -> OpCost:
    seconds, workspace_bytes = row
    if not 0 <= seconds < float("inf") or workspace_bytes < 0:
        raise ValueError(f"not a cost: {row}")
    return OpCost(float(seconds), int(workspace_bytes))
