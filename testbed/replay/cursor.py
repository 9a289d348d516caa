"""When the device that is replayed would be done: one cursor with absolute deadlines."""

from __future__ import annotations

from collections.abc import Callable


class ComputeCursor:
    """Spends recorded compute as waiting.

    The device works through its segments one after another; it stands still only while the run
    waits for messages:

        c = max(c, r) + d,   c the cursor, r the end of the last such wait, d the segment

    and `spend` returns at c, or at once where c has passed. Deadlines are absolute, so that a late
    wake-up does not make the next segment late, and what the host does meanwhile (hooks, copies,
    the optimizer) counts against the segment instead of being added to it, as on a device that
    computes by itself. Nothing spins.

    Args:
        now_s: seconds of a monotonic clock.
        sleep: blocks for so many seconds; may wake late.

    Example:
        >>> moments = iter([10.0, 10.0, 11.5])
        >>> slept = []
        >>> cursor = ComputeCursor(lambda: next(moments), slept.append)
        >>> cursor.spend(1.0)  # 10.0: ends at 11.0
        >>> cursor.spend(2.0)  # 11.5: half a second of it was lost to the host, ends at 13.0
        >>> slept
        [1.0, 1.5]
    """

    def __init__(self, now_s: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._now_s = now_s
        self._sleep = sleep
        self._end_s: float | None = None
        self._resumed_s = float("-inf")
        self._waits = True

    def spend(self, segment_s: float) -> None:
        """Compute for so long."""
        if not self._waits:
            return
        if self._end_s is None:
            self._end_s = self._now_s()
        self._end_s = max(self._end_s, self._resumed_s) + segment_s
        rest_s = self._end_s - self._now_s()
        if rest_s > 0:
            self._sleep(rest_s)

    def resume(self) -> None:
        """The device stood idle until now."""
        self._resumed_s = self._now_s()

    def stop_waiting(self) -> None:
        """From now on all compute takes no time."""
        self._waits = False
