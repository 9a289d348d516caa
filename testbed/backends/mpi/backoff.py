"""How a thread waits for MPI, which can only be polled: the backoff between two polls.

A wait that spins takes the core from the backward pass that it should overlap with. So the thread
yields the core between two polls, and after a while sleeps between them, longer and longer.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# By how much Linux may prolong a sleep of this thread to save wake-ups; 50 us without asking.
SLACK_NS = 1000


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """How long to wait between two polls.

    Attributes:
        yield_s: during this time since the last progress only yield.
        shortest_s: the first sleep after that.
        longest_s: where the growth of sleeps ends.
        growth: each sleep is longer than the last by this factor.
    """

    yield_s: float
    shortest_s: float
    longest_s: float
    growth: float = 1.5


ROOMY = BackoffPolicy(yield_s=1e-3, shortest_s=20e-6, longest_s=500e-6)
CROWDED = BackoffPolicy(yield_s=20e-6, shortest_s=20e-6, longest_s=150e-6)


def sleep_exactly() -> bool:
    """Ask the system not to prolong the sleeps of the calling thread; False if it cannot.

    A message in a ring waits for such a sleep at every hop. On four nodes with two cores, `p3`
    (643 messages a step) was a tenth faster for it.
    """
    slack = Path(f"/proc/{threading.get_native_id()}/timerslack_ns")
    try:
        slack.write_text(f"{SLACK_NS}\n")
    except OSError:  # not Linux, or a sandbox without it: sleeps are longer, nothing else changes
        return False
    return True


def backoff_for(num_ranks: int, num_cores: int) -> BackoffPolicy:
    """Yield where every rank of the host has a core, sleep early where ranks outnumber cores.

    Example:
        >>> backoff_for(2, 2) is ROOMY, backoff_for(4, 2) is CROWDED
        (True, True)
    """
    return ROOMY if num_ranks <= num_cores else CROWDED


def next_sleep_s(policy: BackoffPolicy, waited_s: float, last_s: float) -> float:
    """Seconds to sleep now; 0 = only yield the core.

    Args:
        policy: the bounds.
        waited_s: time since something last progressed.
        last_s: the sleep before this one, 0 if there was none.

    Example:
        >>> next_sleep_s(ROOMY, 1e-4, 0.0), next_sleep_s(ROOMY, 0.01, 400e-6)
        (0.0, 0.0005)
    """
    if waited_s < policy.yield_s:
        return 0.0
    return min(max(policy.shortest_s, last_s * policy.growth), policy.longest_s)


class Backoff:
    """The waiting of one thread: `pause` when nothing progressed, `reset` when something did."""

    def __init__(self, policy: BackoffPolicy) -> None:
        self._policy = policy
        self._since_s: float | None = None
        self._last_s = 0.0

    def reset(self) -> None:
        """Something progressed."""
        self._since_s = None
        self._last_s = 0.0

    def pause(self) -> None:
        """Nothing progressed: give the core up for a while."""
        now_s = time.perf_counter()
        if self._since_s is None:
            self._since_s = now_s
        self._last_s = next_sleep_s(self._policy, now_s - self._since_s, self._last_s)
        if self._last_s:
            time.sleep(self._last_s)
        else:
            os.sched_yield()
