"""Check both engines on a GPU: the bits of plain PyTorch, predicted peaks against measured ones, budgets kept.

Run as `python -m bench.engines_gpu` (`--json FILE`, `--device cpu` to try the program out). The models are those of
`tests/end_to_end/models.py`, without and with a budget at three places of what a plan can reach. Prints JSON with the
date and the device. Ends with 1 if bits differ or a budget is missed, and with 2 where there is no CUDA device.
"""

import argparse
import datetime as dt
import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchecho
from tests.end_to_end.models import CASES, Case
from tests.end_to_end.steps import Left, differences, run_step
from torchecho.bench.training import ask_for_deterministic_kernels
from torchecho.planner.plan import Plan

_STEPS = 3
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "eager": {"engine": "eager"},
    "compile": {"engine": "compile", "lowering": "eager"},
}


def steps_of(case: Case, device: str, **options: Any) -> tuple[list[Left], Plan | None]:
    """Do some steps of a case, as it is or optimized, and return what each left, and the plan."""
    torch._dynamo.reset()  # noqa: SLF001 - the only name it has
    gc.collect()
    torch.manual_seed(0)
    model, inputs = case.build().to(device), tuple(tensor.to(device) for tensor in case.inputs())
    if options:
        torchecho.optimize(model, strict=True, **options)
    left = [_step(model, inputs) for _ in range(_STEPS)]
    return left, torchecho.plans()[-1] if options else None


def _step(model: nn.Module, inputs: tuple[Tensor, ...]) -> Left:
    model.zero_grad(set_to_none=True)
    left = run_step(model, inputs, model)
    if inputs[0].is_cuda:
        left["cuda rng"] = torch.cuda.get_rng_state()
    # Off the device, where what an earlier model has left would count in the peak of a later one.
    return {name: None if tensor is None else tensor.detach().to("cpu", copy=True) for name, tensor in left.items()}


def rows_of(name: str, engine: str, device: str) -> Iterator[dict[str, Any]]:
    """Yield a row for a plan that costs no time, then one for each of up to three budgets.

    Steps of the eager engine are compared with plain PyTorch's, those of the compile engine with its own lowering
    without recomputation.
    """
    case, options = CASES[name], ENGINES[engine]
    plain, again = (steps_of(case, device)[0] for _ in range(2))
    row = {"model": name, "engine": engine}
    left, untouched = steps_of(case, device, max_slowdown=0.0, **options)
    assert untouched is not None
    expected = plain if engine == "eager" else left
    repeatable = not _differences(plain, again)
    yield {**row, "setting": "max_slowdown=0", "plain repeats itself": repeatable, **_found(untouched, left, expected)}
    peaks = [peak for peak, _ in untouched.frontier]
    for budget in sorted({peaks[-1], peaks[len(peaks) // 2], peaks[len(peaks) // 4]}):
        left, plan = steps_of(case, device, memory_budget=budget, **options)
        assert plan is not None
        yield {**row, "setting": budget, **_found(plan, left, expected)}


def _found(plan: Plan, left: list[Left], expected: list[Left]) -> dict[str, Any]:
    return {
        "differences": _differences(expected, left),
        "recomputed": plan.num_recomputed,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "budget_bytes": plan.budget_bytes,
    }


def _differences(expected: list[Left], found: list[Left]) -> list[str]:
    return sorted({name for a, b in zip(expected, found, strict=True) for name in differences(a, b)})


def is_right(row: Mapping[str, Any]) -> bool:
    """Return whether a row shows equal bits and a kept budget."""
    if "failed" in row or row["differences"]:
        return False
    budget, measured = row["budget_bytes"], row["measured_peak_bytes"]
    return budget is None or (measured is not None and measured <= budget)


def run(device: str, seconds: float) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of all models under both engines, and how many models were left out for want of time."""
    until = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    works = [(name, engine) for engine in ENGINES for name in CASES]
    for done, (name, engine) in enumerate(works):
        if time.monotonic() > until:
            return rows, len(works) - done
        try:
            for row in rows_of(name, engine, device):
                rows.append(row)
                print(row, file=sys.stderr)
        except Exception as error:  # noqa: BLE001 - whatever happens with one model, the others are still to be seen
            rows.append({"model": name, "engine": engine, "failed": f"{type(error).__name__}: {error}"})
            print(rows[-1], file=sys.stderr)
    return rows, 0


def main() -> int:
    """Check and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write what was found to a file too")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the program out")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin nothing after so many seconds")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device was found; nothing was checked", file=sys.stderr)
        return 2
    ask_for_deterministic_kernels()
    began = time.monotonic()
    rows, left_out = run(arguments.device, arguments.seconds)
    found = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seconds": time.monotonic() - began,
        "models_left_out": left_out,
        "rows": rows,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text)
    wrong = [row for row in rows if not is_right(row)]
    print(f"{len(rows)} rows, {len(wrong)} wrong", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
