"""Parse and print bytes and seconds."""

import re

from torchecho.errors import OptionError

_BYTES_PER_UNIT = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Read a byte count such as ``"8GiB"``, ``"900 MB"`` or ``"4096"``.

    Raises:
        OptionError: the text is not a number followed by a known unit.
    """
    match = _QUANTITY.fullmatch(text)
    scale = _BYTES_PER_UNIT.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        raise OptionError(
            f"cannot read {text!r} as bytes: write a number and a unit, such as '8GiB' or '900MB'"
            " (units: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)"
        )
    return int(float(match.group(1)) * scale)


def format_bytes(num_bytes: float) -> str:
    """Print bytes in the largest binary unit that keeps at least one digit before the point."""
    magnitude = abs(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if magnitude < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes, magnitude = num_bytes / 1024, magnitude / 1024
    return f"{num_bytes:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Print a duration in the unit (us, ms, s) that keeps three significant digits readable."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def format_overhead(fraction: float) -> str:
    """Print an added-time fraction as a signed percentage."""
    return f"{fraction * 100:+.1f} %"
