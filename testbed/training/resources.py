"""How busy the cores of this rank are, and how much of their time a host of machines takes."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

RESOLVED_S = 1.0  # of the cores' time, a hundred times what the system counts in


@dataclass(frozen=True)
class CoreTimes:
    """Of all cores that this process may use, since the machine started, in seconds.

    Attributes:
        busy_s: they worked, for whomever.
        idle_s: they had nothing to do, or waited for a disk.
        stolen_s: a virtual machine's, which its host gave to others.
    """

    busy_s: float
    idle_s: float
    stolen_s: float


def read_cores() -> CoreTimes:
    """As the system counts them now, whoever it is that they work for."""
    each = psutil.cpu_times(percpu=True)
    # A core's place here is its number only while all cores are on line.
    own = os.sched_getaffinity(0) if len(each) == os.cpu_count() else range(len(each))
    return sum_of([each[number] for number in sorted(own)])


def sum_of(cores: Sequence[Any]) -> CoreTimes:
    """The cores together; each as psutil gives it, in seconds."""
    # A guest's time is counted as user's, too.
    others = {"idle", "iowait", "steal", "guest", "guest_nice"}
    return CoreTimes(
        busy_s=sum(getattr(c, name) for c in cores for name in set(c._fields) - others),
        idle_s=sum(c.idle + getattr(c, "iowait", 0.0) for c in cores),
        stolen_s=sum(getattr(c, "steal", 0.0) for c in cores),
    )


def shares_of(before: CoreTimes, after: CoreTimes) -> tuple[float | None, float | None]:
    """Busy share of the time that the cores had, and stolen share of all time, in between.

        busy / (busy + idle), stolen / (busy + idle + stolen)

    None where the system counted nothing in between: it counts in hundredths of a second.

    Example:
        >>> shares_of(CoreTimes(1.0, 1.0, 0.0), CoreTimes(4.0, 2.0, 1.0))
        (0.75, 0.2)
    """
    # Linux may take back what it counted as waiting or stolen.
    busy_s = max(0.0, after.busy_s - before.busy_s)
    idle_s = max(0.0, after.idle_s - before.idle_s)
    stolen_s = max(0.0, after.stolen_s - before.stolen_s)
    own_s = busy_s + idle_s
    if own_s <= 0:
        return None, None
    return busy_s / own_s, stolen_s / (own_s + stolen_s)


class StolenTime:
    """The share of the cores' time that a host took, from one call to the next.

    The system counts in hundredths of a second, so that a single one would be several per cent of a
    short window, and whether one falls into it is chance: less than a second of all cores together
    is taken for undisturbed.

    Where it never took any since the machine started nothing is asked again: on a machine of its
    own there is nothing to find, and asking many cores between short steps takes time.

    Example:
        >>> 0.0 <= StolenTime().share() <= 1.0
        True
    """

    def __init__(self) -> None:
        self._last = read_cores()
        self._is_shared = self._last.stolen_s > 0

    def share(self) -> float:
        """Since the last call, or since this was made; 0 where that is too short to tell."""
        if not self._is_shared:
            return 0.0
        before, self._last = self._last, read_cores()
        stolen_s = max(0.0, self._last.stolen_s - before.stolen_s)
        own_s = self._last.busy_s + self._last.idle_s - before.busy_s - before.idle_s
        whole_s = stolen_s + max(0.0, own_s)
        return stolen_s / whole_s if whole_s >= RESOLVED_S else 0.0


# Peak memory of the training itself: imports, profiles and set-up before it do not count.

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
