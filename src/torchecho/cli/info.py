"""``torchecho info``: what this machine offers, for bug reports and for choosing a lowering."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

from torchecho.cache import cache_folder
from torchecho.cli.console import JsonPath, check_file, make_console, write_json
from torchecho.units import format_bytes

_CPU_INFO = Path("/proc/cpuinfo")
_COMPILERS = ("c++", "g++", "clang++")


def info(json_path: JsonPath = None) -> None:
    """Print versions, device, cores, threads, compiler and caches.

    Example: torchecho info --json -
    """
    check_file("--json", json_path)
    facts = collect_facts()
    if json_path != "-":
        _print_facts(facts)
    if json_path is not None:
        write_json(json_path, facts)


def collect_facts() -> dict[str, object]:
    """Collect what is known about the machine; sizes in bytes, None for what it does not have."""
    import torch

    from torchecho.meter.capacity import available_cores

    folder = cache_folder()
    return {
        "torchecho": version("torchecho"),
        "torch": torch.__version__,
        "device": name_device(),
        "threads": torch.get_num_threads(),
        "cores": available_cores(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "scipy": version("scipy"),
        "platform": platform.platform(),
        "compiler": describe_compiler(),
        "cache_folder": str(folder),
        "cache_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    }


def name_device(device: str | None = None) -> str:
    """Name the first CUDA device, or the processor for ``"cpu"``; None: the CUDA device where there is one."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    lines = _CPU_INFO.read_text(encoding="utf-8").splitlines() if _CPU_INFO.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def describe_compiler() -> str | None:
    """Name the C++ compiler (``$CXX``, else the first found) and its version; None when the machine has none."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return f"{path} ({_first_line_of_version(path)})"
    return None


def _first_line_of_version(path: str) -> str:
    try:
        # The path is the user's own compiler, found on the user's own PATH.
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)  # noqa: S603 - see above
    except (OSError, subprocess.TimeoutExpired):
        return "version unknown"
    return (done.stdout.splitlines() or ["version unknown"])[0]


def _print_facts(facts: dict[str, object]) -> None:
    console = make_console()
    for name, fact in facts.items():
        text = format_bytes(fact) if name.endswith("_bytes") and isinstance(fact, int) else str(fact)
        label = name.removesuffix("_bytes").replace("_", " ")
        console.print(f"{label:<13} {'none' if fact is None else text}", soft_wrap=True, markup=False)
