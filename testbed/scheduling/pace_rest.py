"""What the tensors behind a position do to a schedule if they stay unfused.

Letters of shapes: T thresholds of tails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from testbed.scheduling.pace_oracle import Job

Floats = NDArray[np.float64]
ROWS_PER_BLOCK = 64


class Row(NamedTuple):
    """The effect on the end B of a busy time: B -> max(B + added_s, least_s); (T,) each.

    `least_s` is minus infinity where no tensor is at or above the threshold.
    """

    added_s: Floats
    least_s: Floats


class Rest:
    """The rows of all positions, worked out backwards.

    Only each 64th row is kept, the others come anew when their block is asked for, so that memory
    grows with n^1.5 and not with n^2; ask for positions in increasing order.

    Args:
        singles: the unfused tensors.
        thresholds_s: (T,) distinct tails, increasing.
    """

    def __init__(self, singles: Sequence[Job], thresholds_s: Floats) -> None:
        self._singles = singles
        self._urgent = [
            int(np.searchsorted(thresholds_s, job.tail_s, side="right")) for job in singles
        ]
        count = len(thresholds_s)
        row = Row(np.zeros(count), np.full(count, -np.inf))
        self._kept = {len(singles): row}
        self._block: dict[int, Row] = {}
        longest_s = np.zeros(count + 1)
        self._blocking_s: dict[int, Floats] = {}
        for position in range(len(singles) - 1, -1, -1):
            row = self._before(position, row)
            job, urgent = singles[position], self._urgent[position]
            longest_s[urgent] = max(longest_s[urgent], job.longest_s)
            if position % ROWS_PER_BLOCK == 0:
                self._kept[position] = row
                self._blocking_s[position] = np.maximum.accumulate(longest_s)[:-1]

    def row(self, position: int) -> Row:
        """The row of tensors `position` and on."""
        if position in self._kept:
            return self._kept[position]
        if position not in self._block:
            start = position - position % ROWS_PER_BLOCK
            last = min(len(self._singles), start + ROWS_PER_BLOCK)
            row, self._block = self._kept[last], {}
            for p in range(last - 1, position - 1, -1):
                row = self._before(p, row)
                self._block[p] = row
        return self._block[position]

    def blocking_s(self, position: int) -> Floats:
        """(T,) at least the longest segment below each threshold of tensors `position` and on."""
        start = min(position, len(self._singles) - 1)
        return self._blocking_s[start - start % ROWS_PER_BLOCK]

    def _before(self, position: int, row: Row) -> Row:
        job, urgent = self._singles[position], self._urgent[position]
        added_s, least_s = row.added_s.copy(), row.least_s.copy()
        added_s[:urgent] += job.total_s
        np.maximum(least_s[:urgent], job.release_s + added_s[:urgent], out=least_s[:urgent])
        return Row(added_s, least_s)
