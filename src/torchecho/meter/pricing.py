"""Price a captured graph: measure what was never measured, keep it, and answer with the costs of every op."""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchecho.cost.device import known_device
from torchecho.cost.model import CostModel, OpCosts, estimate
from torchecho.cost.roofline import Roofline
from torchecho.cost.scaled import Scaled, scale_to
from torchecho.cost.table import CostTable, OpCost, load_table, read_named, save_table, table_folder
from torchecho.ir.graph import TrainingGraph
from torchecho.meter.calibrate import calibrated_device, device_name
from torchecho.meter.ops import measure_op

_logger = logging.getLogger("torchecho")
_PROGRESS_SECONDS = 2.0
_PATIENCE_SECONDS = 0.5  # for second thoughts: the training waits for them
_RUNS_OF_MEASURING = 4  # of an op that takes long

OpCall = tuple[Callable[..., object], Sequence[Any], Mapping[str, Any]]


def price(
    graph: TrainingGraph, call_of: Callable[[int], OpCall], *, cost: str, device: torch.device, may_run: bool = True
) -> OpCosts:
    """Return the seconds and the workspace of every op of a graph.

    What is measured is kept in the device's own table, never in one that the user named.

    Args:
        graph: Graph to price.
        call_of: Returns the function, arguments and keyword arguments (fake tensors) of the op of an index.
        cost: ``"auto"`` (measured where ops may run), ``"roofline"``, ``"measured"``, or the path of a table.
        device: Device that the step runs on.
        may_run: Whether ops may be run on the device.

    Raises:
        OptionError: `cost` is the path of something else than a table of this device.
    """
    roofline = Roofline(_device_spec(device, may_run=may_run))
    if cost == "roofline" or (cost == "auto" and not may_run):
        return estimate(graph, roofline)
    table = _known_costs(cost, device, roofline)
    missing = table.unmeasured(graph) if may_run else ()
    if missing:
        measured = _measure_missing(graph, call_of, missing)
        save_table(CostTable(table.device, roofline, measured), table_path(device))
        table = table.with_entries(measured)
    return estimate(graph, table)


def _known_costs(cost: str, device: torch.device, fallback: CostModel) -> CostTable:
    """Return the costs that are known of a device; those of a table that the user named win."""
    own = load_table(table_path(device), device_name(device), fallback)
    return own if cost in ("auto", "measured") else own.with_entries(read_named(Path(cost), own.device))


def scaled_costs(graph: TrainingGraph, costs: OpCosts, device: torch.device, *, may_run: bool) -> Scaled:
    """Return a cost model for other sizes of a program, from the costs of one of its graphs."""
    return scale_to(Roofline(_device_spec(device, may_run=may_run)), graph, costs)


def price_alike(graph: TrainingGraph, scaled: Scaled, *, cost: str, device: torch.device) -> OpCosts:
    """Return the costs of a graph without running anything: by the table, else by a model scaled to a known graph.

    Args:
        graph: Graph to price.
        scaled: Costs of another graph of the same program.
        cost: As in `price`.
        device: Device that the step runs on.
    """
    if cost == "roofline":
        return estimate(graph, scaled.model)
    return estimate(graph, _known_costs(cost, device, scaled))


def _device_spec(device: torch.device, *, may_run: bool) -> Any:
    if may_run or device.type == "cpu":
        return calibrated_device(device)
    return known_device(torch.cuda.get_device_name(device) if torch.cuda.is_available() else "A100")


def table_path(device: torch.device) -> Path:
    """Return the file that keeps the measured costs of a device under this torch and thread count."""
    key = f"{device_name(device)} torch {torch.__version__} threads {torch.get_num_threads()}"
    return table_folder() / (re.sub(r"[^A-Za-z0-9.]+", "-", key) + ".json")


def _measure_missing(
    graph: TrainingGraph, call_of: Callable[[int], OpCall], missing: Sequence[int]
) -> dict[str, OpCost | None]:
    """Measure ops: each in a few runs, then more and a second time while there is patience.

    The second time begins with those that take most of the step, and the faster is kept: another process seldom slows
    the same op down twice.
    """
    started = told = time.perf_counter()
    entries: dict[str, OpCost | None] = {}
    for done, index in enumerate(missing):
        entries[graph.ops[index].signature] = _faster(None, measure_op(*call_of(index), budget_seconds=0.0))
        if time.perf_counter() - told > _PROGRESS_SECONDS:
            told = time.perf_counter()
            _logger.info("measuring ops: %d of %d, %.0f s", done + 1, len(missing), told - started)
    seconds = {key: 0.0 if cost is None else cost.seconds for key, cost in entries.items()}
    times = Counter(op.signature for op in graph.ops)
    for index in sorted(missing, key=lambda i: -seconds[graph.ops[i].signature] * times[graph.ops[i].signature]):
        key = graph.ops[index].signature
        left = started + _PATIENCE_SECONDS - time.perf_counter()
        if seconds[key] and _RUNS_OF_MEASURING * seconds[key] < left:
            entries[key] = _faster(entries[key], measure_op(*call_of(index)))
    return entries


def _faster(known: OpCost | None, measured: tuple[float, int] | None) -> OpCost | None:
    if measured is None:
        return known
    seconds, workspace_bytes = measured
    if known is None:
        return OpCost(seconds, workspace_bytes)
    return OpCost(min(known.seconds, seconds), max(known.workspace_bytes, workspace_bytes))
