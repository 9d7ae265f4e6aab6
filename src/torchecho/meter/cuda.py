"""Live bytes of a CUDA device from the statistics of PyTorch's caching allocator."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CudaCounter:
    """Reads and resets the counters of one device.

    The counts are of requested bytes: what the program asked for, before the allocator rounds it up to its blocks.
    Not seen: memory that bypasses the allocator (the CUDA context, NCCL buffers, cuDNN and cuBLAS handles).
    """

    device: torch.device

    def live_bytes(self) -> int:
        """Return the requested bytes that are live now."""
        return self._requested_bytes("current")

    def peak_bytes(self) -> int:
        """Return the most requested bytes live since the last `reset_peak`."""
        return self._requested_bytes("peak")

    def reset_peak(self) -> None:
        """Start new peaks at what is live now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def synchronize(self) -> None:
        """Wait until the device has run all that was launched."""
        torch.cuda.synchronize(self.device)

    def _requested_bytes(self, when: str) -> int:
        # Nested as the allocator gives them: to flatten all of them takes longer than most ops.
        return int(torch.cuda.memory_stats_as_nested_dict(self.device)["requested_bytes"]["all"][when])
