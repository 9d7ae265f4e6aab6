"""What `bench` and `demo` share: results of this machine, and how they are printed."""

from collections.abc import Sequence
from importlib.metadata import version

from rich.console import Console

from torchecho.report.cells import groups_of
from torchecho.report.results import ResultRow, Results, sweep_faults
from torchecho.report.tables import results_report


def make_results(rows: Sequence[ResultRow], device: str = "cpu") -> Results:
    """Put rows together with the versions, the device and the threads that they were measured with."""
    import torch

    from torchecho.cli.info import name_device

    return Results(version("torchecho"), torch.__version__, name_device(device), torch.get_num_threads(), tuple(rows))


def print_results(console: Console, rows: Sequence[ResultRow]) -> None:
    """Print a table for each workload and size."""
    for table in results_report(rows):
        console.print(table)


def print_faults(console: Console, rows: Sequence[ResultRow]) -> None:
    """Print what breaks a promise of falling budgets, for each workload and size."""
    for (workload, size), group in groups_of(rows).items():
        for fault in sweep_faults([row for row in group if row.peak_bytes is not None]):
            console.print(f"{workload}, {size}: {fault}", markup=False, soft_wrap=True)
