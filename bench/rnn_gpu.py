"""Check the Triton kernels of the recurrent layers on a GPU, and time them against cuDNN.

Run as `python -m bench.rnn_gpu` (`--json FILE`, `--quick`, `--seconds 450`). Prints JSON with the date and the device.
Ends with 1 if a check fails, and with 2 where there is no CUDA device or no Triton. Whatever would begin after
`--seconds` is left out, and counted.
"""

import argparse
import datetime as dt
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from torchecho.nn import GRU, LSTM, RNN
from torchecho.rnn import dispatch

OWN = {"lstm": LSTM, "gru": GRU, "elman": RNN}
THEIRS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "elman": torch.nn.RNN}
MODES = {"lstm": ("gates", "preact", "cell", "lean"), "gru": ("gates", "lean"), "elman": ("lean",)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ONE_ULP = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
#: T, B, I, H of what is checked, and whether lengths differ.
CHECKED = ((7, 5, 9, 19, False), (12, 33, 40, 128, False), (12, 9, 16, 100, True), (40, 8, 24, 200, False))
#: T, B, H, L of what is timed.
TIMED = ((50, 64, 512, 1), (100, 32, 256, 2), (35, 20, 650, 2), (64, 128, 128, 1), (200, 32, 1024, 1))
_TIMES_ALLOWED = 3  # our error against double precision, as a multiple of cuDNN's
_REPEATS = 10
_WARM_UPS = 5  # more than a graph waits before it is made


@dataclass(frozen=True)
class Work:
    """One layer or stack to run."""

    family: str
    mode: str
    dtype: str
    T: int
    B: int
    I: int  # noqa: E741 - inputs
    H: int
    layers: int = 1
    packed: bool = False

    def modules(self) -> tuple[Any, Any]:
        """Return ours and torch.nn's, with the same weights."""
        torch.manual_seed(0)
        options = {"device": "cuda", "dtype": DTYPES[self.dtype]}
        ours = OWN[self.family](self.I, self.H, self.layers, stash=self.mode, **options)
        theirs = THEIRS[self.family](self.I, self.H, self.layers, **options)
        theirs.load_state_dict(ours.state_dict())
        theirs.flatten_parameters()
        return ours, theirs

    def input(self) -> Tensor | PackedSequence:
        """Return the input; packed lengths fall from T to T / 3."""
        torch.manual_seed(1)
        x = torch.randn(self.T, self.B, self.I, device="cuda", dtype=DTYPES[self.dtype])
        if not self.packed:
            return x.requires_grad_()
        lengths = torch.linspace(self.T, self.T / 3, self.B).round().long()
        packed = pack_padded_sequence(x, lengths)
        return packed._replace(data=packed.data.requires_grad_())


def results(module: Any, given: Tensor | PackedSequence) -> list[Tensor]:
    """Return the outputs and the gradients of the input and the weights, for a fixed weighting of all outputs."""
    y, hx = module(given)
    outputs = [y.data if isinstance(y, PackedSequence) else y, *(hx if isinstance(hx, tuple) else (hx,))]
    generator = torch.Generator("cuda").manual_seed(2)
    weights = [torch.randn(o.shape, device="cuda", generator=generator).to(o.dtype) for o in outputs]
    leaf = given.data if isinstance(given, PackedSequence) else given
    return [*outputs, *torch.autograd.grad(outputs, [leaf, *module.parameters()], weights)]


def check(work: Work) -> dict[str, Any]:
    """Return the largest errors of ours and of cuDNN's against plain PyTorch in double precision."""
    ours, theirs = work.modules()
    given = work.input()
    exact_module = OWN[work.family](work.I, work.H, work.layers, device="cuda", dtype=torch.float64)
    exact_module.load_state_dict(ours.state_dict())
    data = given.data if isinstance(given, PackedSequence) else given
    wide = data.detach().double().requires_grad_()
    exact = results(exact_module, given._replace(data=wide) if isinstance(given, PackedSequence) else wide)
    found, known = errors(results(ours, given), exact), errors(results(theirs, given), exact)
    for _ in range(_WARM_UPS):  # again, by graphs
        found = [max(pair) for pair in zip(found, errors(results(ours, given), exact), strict=True)]
    allowed = [_TIMES_ALLOWED * max(error, ONE_ULP[work.dtype]) for error in known]
    tensors = [data, *ours.parameters()]
    return {
        **vars(work),
        "kernels": dispatch.kernels_for(work.family, tensors).__name__,
        "error": max(found),
        "cudnn_error": max(known),
        "passed": all(f <= a for f, a in zip(found, allowed, strict=True)),
    }


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Return the largest error of each tensor relative to its largest element."""
    pairs = zip(found, exact, strict=True)
    return [float((f.detach().double() - e).abs().max() / e.abs().max().clamp_min(1e-30)) for f, e in pairs]


def timed(work: Work) -> dict[str, Any]:
    """Return seconds and bytes of a forward and backward, ours and cuDNN's in turn."""
    ours, theirs = work.modules()
    given = work.input()
    seconds: dict[str, list[float]] = {"ours": [], "cudnn": []}
    for repeat in range(_WARM_UPS + _REPEATS):
        for name, module in (("ours", ours), ("cudnn", theirs)):
            taken = step_seconds(module, given)
            if repeat >= _WARM_UPS:
                seconds[name].append(taken)
    ours_seconds, cudnn_seconds = (sorted(seconds[name])[_REPEATS // 2] for name in ("ours", "cudnn"))
    return {
        **vars(work),
        "seconds": ours_seconds,
        "cudnn_seconds": cudnn_seconds,
        "speed": cudnn_seconds / ours_seconds,
        "stash_bytes": stash_bytes(ours, given),
        "cudnn_stash_bytes": stash_bytes(theirs, given),
        "cudnn_reserve_bytes": reserve_bytes(theirs, given, work),
        "peak_bytes": peak_bytes(ours, given),
        "cudnn_peak_bytes": peak_bytes(theirs, given),
    }


def step_seconds(module: Any, given: Tensor | PackedSequence) -> float:
    """Return the seconds of one forward and backward."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    results(module, given)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def stash_bytes(module: Any, given: Tensor | PackedSequence) -> int:
    """Return the bytes that a forward leaves allocated: its outputs, and what it keeps for the backward."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    outputs = module(given)
    left = torch.cuda.memory_allocated() - before
    del outputs
    return left


def peak_bytes(module: Any, given: Tensor | PackedSequence) -> int:
    """Return the bytes that a forward and backward allocate at most."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results(module, given)
    return torch.cuda.max_memory_allocated() - before


def reserve_bytes(module: Any, given: Tensor | PackedSequence, work: Work) -> int:
    """Return the size of cuDNN's reserve, which it hands from forward to backward; 0 if it cannot be asked for."""
    packed = isinstance(given, PackedSequence)
    data, sizes = (given.data, given.batch_sizes.tolist()) if packed else (given, [])
    weights = [weight for layer in module.all_weights for weight in layer]
    h = torch.zeros(work.layers, work.B, work.H, device="cuda", dtype=data.dtype)
    c = h.clone() if work.family == "lstm" else None
    mode = {"elman": 1, "lstm": 2, "gru": 3}[work.family]  # cuDNN's numbers; 1 is tanh
    arguments = (weights, 4, None, h, c, mode, work.H, 0, work.layers, False, 0.0, True, False, sizes, None)
    try:
        reserve = torch.ops.aten._cudnn_rnn(data.detach(), *arguments)[3]  # noqa: SLF001 - its name
    except RuntimeError as error:
        print(f"cuDNN's reserve: {error}", file=sys.stderr)
        return 0
    return int(reserve.numel() * reserve.element_size())


def checks() -> Iterator[Work]:
    """Return what is checked: every family, mode and type at every shape."""
    for T, B, I, H, packed in CHECKED:  # noqa: E741 - I inputs
        for family, modes in MODES.items():
            for mode in modes:
                for dtype in DTYPES:
                    yield Work(family, mode, dtype, T, B, I, H, packed=packed)


def timings() -> Iterator[Work]:
    """Return what is timed: every family and mode, in two types, and packed input for the first shape."""
    for place, (T, B, H, layers) in enumerate(TIMED):
        for family, modes in MODES.items():
            for mode in modes:
                for dtype in ("float32", "bfloat16"):
                    for packed in (False, True) if place == 0 else (False,):
                        yield Work(family, mode, dtype, T, B, H, H, layers, packed=packed)


@contextmanager
def same_precision() -> Iterator[None]:
    """Let neither side round float32 products to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def run(works: list[Work], do: Callable[[Work], dict[str, Any]], until: float) -> tuple[list[dict[str, Any]], int]:
    """Return a row for each work that begins in time, and how many did not."""
    rows: list[dict[str, Any]] = []
    for done, work in enumerate(works):
        if time.monotonic() > until:
            return rows, len(works) - done
        try:
            rows.append(do(work))
        except Exception as error:  # noqa: BLE001 - whatever one kernel does, the others are still to be seen
            rows.append({**vars(work), "failed": f"{type(error).__name__}: {error}", "passed": False})
        print(rows[-1], file=sys.stderr)
    return rows, 0


def main() -> int:
    """Check and time; print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write what was found to a file too")
    parser.add_argument("--quick", action="store_true", help="check and time the first shape only")
    parser.add_argument("--seconds", type=float, default=450.0, help="begin nothing after so many seconds")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device was found; nothing was checked or timed", file=sys.stderr)
        return 2
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed (extra `gpu`); nothing was checked or timed", file=sys.stderr)
        return 2
    began = time.monotonic()
    checked, timed_works = list(checks()), list(timings())
    if arguments.quick:
        first_checked, first_timed = CHECKED[0][:2], TIMED[0][:2]
        checked = [work for work in checked if first_checked == (work.T, work.B)]
        timed_works = [work for work in timed_works if first_timed == (work.T, work.B)]
    with same_precision():
        check_rows, unchecked = run(checked, check, began + arguments.seconds / 2)
        time_rows, untimed = run(timed_works, timed, began + arguments.seconds)
    found = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": importlib.import_module("triton").__version__,
        "seconds": time.monotonic() - began,
        "left_out": {"checks": unchecked, "timings": untimed},
        "checks": check_rows,
        "timings": time_rows,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text)
    return 0 if all(row.get("passed", True) for row in check_rows + time_rows) else 1


if __name__ == "__main__":
    sys.exit(main())
