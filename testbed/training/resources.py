"""Peak memory of the training itself: imports, profiles and set-up before it do not count."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def reset_peak(device: torch.device) -> None:
    """Forget the highest memory use so far (on Linux and on a GPU; elsewhere it stays)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        _CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Highest memory use since `reset_peak`: of the device, or the resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
