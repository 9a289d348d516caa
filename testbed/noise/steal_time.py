"""Steal time: the share of the cores that the host of a virtual machine gave to other guests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import psutil

from testbed.base.types import BSP
from testbed.noise.steady import steady_steps
from testbed.records.cell import Cell

NOTICED: Final = 0.01  # share from which on reports mention it
TOO_MUCH: Final = 0.03  # share from which on a run may be repeated
LINK_STOLEN: Final = "cores_stolen"  # key in the link of a cell
RESOLVED_S = 1.0  # of the cores' time, a hundred times what the system counts in


@dataclass(frozen=True)
class CoreTimes:
    """Seconds of all cores that this process may use, since the machine started.

    Attributes:
        busy_s: executing any process.
        idle_s: idle, or waiting for a disk.
        stolen_s: runnable, but the host of the virtual machine ran another guest (steal time).
    """

    busy_s: float
    idle_s: float
    stolen_s: float


def read_cores() -> CoreTimes:
    """The counters of the operating system now, over all processes."""
    each = psutil.cpu_times(percpu=True)
    # A core's place here is its number only while all cores are on line.
    own = os.sched_getaffinity(0) if len(each) == os.cpu_count() else range(len(each))
    return sum_of([each[number] for number in sorted(own)])


def sum_of(cores: Sequence[Any]) -> CoreTimes:
    """Sum over cores of the times (s) that psutil gives for each."""
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


class StealTime:
    """Steal time as a share of the cores' time, between one call of `share` and the next.

    The system counts in hundredths of a second: a window of less than a second of core time, all
    cores together, cannot resolve a share of one per cent, and counts as undisturbed. If the
    counters show no steal time at all since the machine started, they are not read again: reading
    them for many cores between short steps takes time.

    Example:
        >>> 0.0 <= StealTime().share() <= 1.0
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


def describe_stolen(cell: Cell) -> str:
    """Both shares, each with its window; empty where nothing was recorded.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> describe_stolen(Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...                      cores_stolen=0.02, link={"cores_stolen": 0.051}))
        '5.1 % while the link was measured, 2.0 % during the steps'
    """
    during_link = (cell.link or {}).get(LINK_STOLEN)
    windows = (
        ("while the link was measured", during_link),
        ("during the steps", cell.cores_stolen),
    )
    return ", ".join(f"{100 * share:.1f} % {when}" for when, share in windows if share is not None)


def stolen_of(cell: Cell) -> float | None:
    """Share of the cores' time that a virtual machine's host gave to others.

    The larger of two: while the link was measured that the prediction is made with, and from the
    first measured step to the last. None where neither was recorded.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> stolen_of(Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...                cores_stolen=0.02, link={"cores_stolen": 0.05}))
        0.05
    """
    shares = [cell.cores_stolen, (cell.link or {}).get(LINK_STOLEN)]
    return max((share for share in shares if share is not None), default=None)


def lost_of(cell: Cell) -> float | None:
    """Share of the cores' time that others took from what counts; None where it is not known.

    The host of a virtual machine, and, in each step, processes outside the cell.

    The larger of two: while the link was measured that the prediction is made with, and the mean
    over the measured steps that count. Over all of them where steps were too short to tell, where
    workers do not keep step (their speed is of all steps), and where time to accuracy counts.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> from testbed.records.cell import StepSamples
        >>> cell = Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...             cores_stolen=0.2, link={"cores_stolen": 0.01},
        ...             samples=StepSamples(cores_stolen=[0.9, 0.0, 0.02, 0.0, 0.0]))
        >>> lost_of(cell)
        0.01
    """
    shares = cell.samples.cores_taken
    by_step = any(shares) and cell.consistency == BSP and not cell.time_to_accuracy_s
    counting = steady_steps(shares, shares, cell.samples.unsteady) if by_step else []
    during_steps = fmean(counting) if counting else cell.cores_stolen
    known = (during_steps, (cell.link or {}).get(LINK_STOLEN))
    return max((share for share in known if share is not None), default=None)
