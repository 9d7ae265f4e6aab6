"""Device numbers for the roofline: a table of known GPUs, and the file of a calibrated device."""

import dataclasses
import difflib
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from torchecho.cache import cache_folder, read_json, write_json
from torchecho.errors import OptionError

_logger = logging.getLogger("torchecho")
_KIND = "device/1"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What a device can do at best.

    Attributes:
        name: Name that PyTorch or the system gives the device.
        flops_per_second: Of float32 matrix products.
        bytes_per_second: Of reads and writes of its main memory, together.
        launch_seconds: Least time between the starts of two ops.
        half_flops_per_second: Of float16 and bfloat16 matrix products; 0 when it is not known.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    half_flops_per_second: float = 0.0


# Launching an op from Python takes the host about this long whatever the GPU; calibration replaces it.
_LAUNCH_SECONDS = 5e-6

# Peaks from NVIDIA's data sheets: float32 without TF32 (PyTorch's default precision), dense float16 tensor cores.
KNOWN_DEVICES: tuple[DeviceSpec, ...] = (
    # A100 Tensor Core GPU data sheet: 19.5 TFLOPS, 312 TFLOPS; 1555 GB/s (40 GB), 2039 GB/s (80 GB SXM).
    DeviceSpec("A100 40GB", 19.5e12, 1555e9, _LAUNCH_SECONDS, 312e12),
    DeviceSpec("A100 80GB", 19.5e12, 2039e9, _LAUNCH_SECONDS, 312e12),
    # H100 Tensor Core GPU data sheet, SXM: 67 TFLOPS, 1979 TFLOPS with sparsity (half of it dense), 3.35 TB/s.
    DeviceSpec("H100", 67e12, 3350e9, _LAUNCH_SECONDS, 989e12),
    # H200 Tensor Core GPU data sheet, SXM: the H100's compute, 4.8 TB/s.
    DeviceSpec("H200", 67e12, 4800e9, _LAUNCH_SECONDS, 989e12),
    # L4 Tensor Core GPU data sheet: 30.3 TFLOPS, 242 TFLOPS with sparsity (half of it dense), 300 GB/s.
    DeviceSpec("L4", 30.3e12, 300e9, _LAUNCH_SECONDS, 121e12),
    # T4 Tensor Core GPU data sheet: 8.1 TFLOPS, 65 TFLOPS, 320 GB/s.
    DeviceSpec("T4", 8.1e12, 320e9, _LAUNCH_SECONDS, 65e12),
    # V100 Tensor Core GPU data sheet, SXM2: 15.7 TFLOPS, 125 TFLOPS, 900 GB/s.
    DeviceSpec("V100", 15.7e12, 900e9, _LAUNCH_SECONDS, 125e12),
    # GA102 architecture white paper: 35.6 TFLOPS, 71 TFLOPS (float32 accumulation), 936 GB/s.
    DeviceSpec("RTX 3090", 35.6e12, 936e9, _LAUNCH_SECONDS, 71e12),
    # Ada architecture white paper: 82.6 TFLOPS, 165.2 TFLOPS (float32 accumulation), 1008 GB/s.
    DeviceSpec("RTX 4090", 82.6e12, 1008e9, _LAUNCH_SECONDS, 165.2e12),
)


def known_device(name: str) -> DeviceSpec:
    """Find a GPU of the built-in table by a name such as ``"NVIDIA A100-SXM4-80GB"`` or ``"h100"``.

    Raises:
        OptionError: the table has no such device; names those it has and the nearest.
    """
    words = _words(name)
    for spec in KNOWN_DEVICES:
        if words >= _words(spec.name):
            return spec
    for spec in KNOWN_DEVICES:  # an A100 whose name has no size: the first, and smaller, of its kind
        if words and words <= _words(spec.name):
            return spec
    names = [spec.name for spec in KNOWN_DEVICES]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    raise OptionError(f"unknown device {name!r}: nearest is {near[0]!r}; known are {', '.join(names)}")


def spec_path(key: str) -> Path:
    """Return where the cache keeps the calibrated spec of a device; `key` holds all that its numbers depend on."""
    return cache_folder() / f"device-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def save_spec(spec: DeviceSpec, path: Path) -> None:
    """Write a spec as JSON, atomically; a folder that cannot be written costs a logged warning, no more."""
    try:
        write_json(path, _KIND, dataclasses.asdict(spec))
    except OSError as error:
        _logger.warning("cannot keep the calibrated device numbers in %s: %s", path, error)


def load_spec(path: Path) -> DeviceSpec | None:
    """Read a spec; None when there is none, or, with one warning, when the file is damaged or foreign."""
    body = read_json(path, _KIND)
    if body is None:
        return None
    try:
        spec = DeviceSpec(**{**body, "name": str(body["name"])})
        rates = (spec.flops_per_second, spec.bytes_per_second, spec.launch_seconds)
        if all(rate > 0 for rate in rates) and spec.half_flops_per_second >= 0:
            return spec
    except (KeyError, TypeError):
        pass
    _logger.warning("ignoring the damaged cache file %s: its numbers are missing, unknown or not positive", path)
    return None


def _words(name: str) -> frozenset[str]:
    return frozenset(name.upper().replace("-", " ").split()) - {"NVIDIA", "GEFORCE", "TESLA"}
