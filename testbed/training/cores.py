"""How busy the cores of this machine are, and how much of their time others take."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class CoreTimes:
    """Of all cores since the machine started, in seconds.

    Attributes:
        busy_s: they worked, for whomever.
        idle_s: they had nothing to do, or waited for a disk.
        stolen_s: a virtual machine's, which its host gave to others.
    """

    busy_s: float
    idle_s: float
    stolen_s: float


def read_cores() -> CoreTimes:
    """As the system counts them now."""
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    stolen_s = getattr(times, "steal", 0.0)
    # A guest's time is counted as user's, too.
    rest = set(times._fields) - {"idle", "iowait", "steal", "guest", "guest_nice"}
    return CoreTimes(sum(getattr(times, name) for name in rest), idle_s, stolen_s)


def shares_of(before: CoreTimes, after: CoreTimes) -> tuple[float | None, float | None]:
    """Busy share of the time that the cores had, and stolen share of all time, in between.

        busy / (busy + idle), stolen / (busy + idle + stolen)

    None where the system counted nothing in between: it counts in hundredths of a second.

    Example:
        >>> shares_of(CoreTimes(1.0, 1.0, 0.0), CoreTimes(4.0, 2.0, 1.0))
        (0.75, 0.2)
    """
    busy_s, idle_s = after.busy_s - before.busy_s, after.idle_s - before.idle_s
    stolen_s = after.stolen_s - before.stolen_s
    own_s = busy_s + idle_s
    if own_s <= 0:
        return None, None
    return busy_s / own_s, stolen_s / (own_s + stolen_s)
