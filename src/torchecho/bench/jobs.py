"""The jobs of the worker; each runs in a process of its own and returns what JSON holds."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torchecho.bench.demo_jobs import floor_bytes, largest_eager_batch, train
from torchecho.bench.eager_jobs import calls, language_model, lengths
from torchecho.bench.example import checkout
from torchecho.bench.measuring import configuration, sweep
from torchecho.bench.processes import Tell
from torchecho.bench.rnn_jobs import rnn_compiled, rnn_layers
from torchecho.errors import OptionError


def planner(tell: Tell, *, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run the planner's own benchmark, which is a program of the checkout.

    Raises:
        OptionError: there is no checkout.
    """
    root = checkout()
    if root is None or not (root / "bench" / "planner.py").is_file():
        raise OptionError("the planner workload runs from a source checkout only: its graphs are in bench/")
    sys.path.insert(0, str(root))
    tell("planning synthetic graphs")
    rows: list[dict[str, Any]] = importlib.import_module("bench.planner").run(**settings, tell=tell)
    return rows


JOBS: Mapping[str, Callable[..., Any]] = {
    "configuration": configuration,
    "sweep": sweep,
    "planner": planner,
    "rnn_layers": rnn_layers,
    "rnn_compiled": rnn_compiled,
    "language_model": language_model,
    "lengths": lengths,
    "calls": calls,
    "train": train,
    "largest_eager_batch": largest_eager_batch,
    "floor_bytes": floor_bytes,
}
