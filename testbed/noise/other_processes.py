"""Processor time of processes outside the cell: another job, a compiler, a backup."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import psutil

from testbed.noise.steal_time import RESOLVED_S

TICK_S: Final = 0.01  # what the system counts a core's time in, at the coarsest


class CoreUse(NamedTuple):
    """Core seconds since the machine started, or in between two readings.

    Attributes:
        busy_s: the cores were executing any process.
        own_s: of that, the cell's own.
        whole_s: all.
        stolen_s: the host of the virtual machine ran another guest.
    """

    busy_s: float
    own_s: float
    whole_s: float
    stolen_s: float

    def since(self, before: CoreUse) -> CoreUse:
        """What was used between an earlier reading and this one.

        Example:
            >>> CoreUse(8.0, 4.0, 10.0, 0.5).since(CoreUse(2.0, 1.0, 3.0, 0.5))
            CoreUse(busy_s=6.0, own_s=3.0, whole_s=7.0, stolen_s=0.0)
        """
        return CoreUse(*(new - old for new, old in zip(self, before, strict=True)))

    def outside_share(self) -> float:
        """See `outside_share`; what the host took is not counted."""
        return outside_share(self.busy_s, self.own_s, self.whole_s)


def outside_share(busy_s: float, own_s: float, whole_s: float) -> float:
    """Share of the cores' time that other processes used, as far as it is certain.

        max(0, busy - own - 2 sqrt(busy tick)) / whole

    The system samples once a tick what a core does, so that the number of busy ticks is off by
    about its root; what sampling may have made up does not count.

    Args:
        busy_s: the cores', executing any process.
        own_s: of that, the cell's own processes'.
        whole_s: all time of the cores.

    Example:
        >>> round(outside_share(8.0, 4.0, 10.0), 3), outside_share(4.1, 4.0, 10.0)
        (0.343, 0.0)
    """
    if whole_s <= 0:
        return 0.0
    return max(0.0, busy_s - own_s - sampled_s(busy_s)) / whole_s


def sampled_s(busy_s: float) -> float:
    """What sampling may have made up of so many busy seconds.

    Example:
        >>> sampled_s(1.0)
        0.2
    """
    return 2 * math.sqrt(max(0.0, busy_s) * TICK_S)


class OtherProcesses:
    """What processes outside the cell took of the cores that this process may use.

    The cell's processes are those that descend from its root when this is made. Of one that may
    use other cores, too, as large a part of its time counts as of its cores are among ours. Time
    in interrupts is nobody's: the cell's own messages cause it.

    Args:
        root: id of the process below which the cell's processes on this machine are.

    Example:
        >>> 0.0 <= OtherProcesses(os.getpid()).share() <= 1.0
        True
    """

    def __init__(self, root: int) -> None:
        self._cores = os.sched_getaffinity(0)
        self._family = list(_weighted(root, self._cores))
        self._spent_s = [0.0] * len(self._family)
        self._asked_s = time.monotonic()
        self._step = self._begin = self.read()
        self._is_known = True

    def begin(self) -> None:
        """Begin the window of `whole_share` here."""
        self._begin = self.read()

    def whole_share(self) -> float:
        """Share of the cores' time since `begin`."""
        return self.read().since(self._begin).outside_share()

    def share(self) -> float:
        """Share since the last call, or since this was made; 0 where that cannot be told.

        A window of less than a second of core time, all cores together, cannot be resolved; while
        steps are as short as that nothing is read.
        """
        now_s = time.monotonic()
        window_s, self._asked_s = now_s - self._asked_s, now_s
        if window_s * len(self._cores) < RESOLVED_S:
            self._is_known = False
            return 0.0
        before, self._step = self._step, self.read()
        was_known, self._is_known = self._is_known, True
        return self._step.since(before).outside_share() if was_known else 0.0

    def read(self) -> CoreUse:
        """The counters now."""
        for number, (process, weight) in enumerate(self._family):
            try:
                spent = process.cpu_times()
            except psutil.Error:  # it has ended: what was last known stays
                continue
            self._spent_s[number] = weight * (spent.user + spent.system)
        each = psutil.cpu_times(percpu=True)
        # A core's place here is its number only while all cores are on line.
        cores = [each[i] for i in sorted(self._cores)] if len(each) == os.cpu_count() else each
        busy_s = sum(c.user + c.system + getattr(c, "nice", 0.0) for c in cores)
        twice = {"guest", "guest_nice"}  # counted as user's, too
        whole_s = sum(getattr(c, name) for c in cores for name in set(c._fields) - twice)
        stolen_s = sum(getattr(c, "steal", 0.0) for c in cores)
        return CoreUse(busy_s, sum(self._spent_s), whole_s, stolen_s)


def _weighted(root: int, cores: set[int]) -> Iterator[tuple[psutil.Process, float]]:
    """The processes of a family that may use some of the cores, each with its part of them."""
    try:
        top = psutil.Process(root)
        family = [top, *top.children(recursive=True)]
    except psutil.Error:  # it has ended, or belongs to somebody else
        family = [psutil.Process()]
    for process in family:
        try:
            allowed = set(process.cpu_affinity())
        except psutil.Error:
            continue
        if allowed & cores:
            yield process, len(allowed & cores) / len(allowed)
