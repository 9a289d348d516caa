"""The cheapest actions of layers that stand one after the other, by dynamic programming. Pure.

Layers that are made again and follow each other are a segment: all of it is there at once when
its last layer is wanted. With the budget B, K bytes kept before a segment a .. b, the saved bytes
s_l of its layers and what else is there at most while layer l is gone through backward, w_l:

    K + max over j in a .. b of (s_a + .. + s_j + w_j) <= B

A layer that is kept adds s_l to K; one that is moved adds nothing, but must fit when it is back.
The real layers branch and overwrite each other's outputs, so what comes out is a start for the
search, which asks the simulator. Layers that must be made again together are one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from testbed.memory.planning.bounds import Bounds
from testbed.memory.planning.lifetimes import KEEP, OFFLOAD, RECOMPUTE

BUCKETS: Final = 256
TRIES: Final = 8


class Chain:
    """Layers of a step in the order in which they run."""

    def __init__(self, bounds: Bounds) -> None:
        step, simulator = bounds.simulator.lifetimes, bounds.simulator
        self.num_units = len(step.units)
        self.constant = bounds.constant
        self.groups = _tied(bounds)
        turn = simulator.first_unpacked
        crosses = bounds.saved & (bounds.until > turn)
        fixed = np.zeros(len(step.values), dtype=bool)
        fixed[[number for number, is_fixed, _ in simulator.delicate if is_fixed]] = True
        self.saved: list[int] = []
        self.fixed: list[int] = []
        self.work: list[int] = []
        self.run_s: list[float] = []
        self.move_s: list[float] = []
        unit_s = [0.0] * self.num_units
        for op in step.ops:
            unit_s[op.unit] += op.time_s
        for group in self.groups:
            numbers = np.array([v for unit in group for v in bounds.units[unit]], dtype=np.int64)
            held = numbers[crosses[numbers]]
            self.saved.append(int(simulator.size[held].sum()))
            self.fixed.append(int(simulator.size[held[fixed[held]]].sum()))
            wanted = held[bounds.first_unpacked[held] >= 0]
            window = slice(0, 1)
            if len(wanted):
                begin = int(bounds.first_unpacked[wanted].min())
                window = slice(begin, max(begin + 1, int(bounds.released[wanted].max())))
            self.work.append(int(simulator.always[window].max()))
            run_s = sum(unit_s[unit] for unit in group)
            self.run_s.append(run_s if len(wanted) else 0.0)
            copy_s = float(simulator.size[held].sum()) / simulator.costs.host_bytes_per_s
            stall_s = max(0.0, copy_s - run_s)
            self.move_s.append(2 * copy_s * simulator.costs.copy_share + stall_s)

    def least_peaks(self, low: int, high: int) -> Iterator[str]:
        """Choices for ever smaller budgets, down to the least with which there is one."""
        for _ in range(TRIES):
            middle = (low + high) // 2
            letters = self.cheapest(middle)
            if letters is None:
                low = middle
            else:
                high = middle
                yield letters

    def cheapest(self, budget_bytes: int) -> str | None:
        """The cheapest choice that fits as this chain is seen; None: there is none."""
        room = budget_bytes - self.constant
        if room <= 0:
            return None
        n, bucket = len(self.groups), room / BUCKETS
        best = np.full((n + 1, BUCKETS + 1), np.inf)  # closed before a layer, by kept bytes
        came = np.full((n + 1, BUCKETS + 1), -1, dtype=np.int64)  # from which layer and bucket
        closed_by = np.zeros((n + 1, BUCKETS + 1), dtype=np.uint8)
        best[0, 0] = 0.0
        index = np.arange(BUCKETS + 1)
        end: tuple[float, int, int] = (np.inf, -1, -1)
        for begin in range(n):
            if not np.isfinite(best[begin]).any():
                continue
            held = need = fixed = 0
            again_s = 0.0
            for stop in range(begin, n + 1):
                if stop > begin:
                    held += self.saved[stop - 1]
                    fixed += self.fixed[stop - 1]
                    again_s += self.run_s[stop - 1]
                    need = max(need, held + self.work[stop - 1])
                fits = int((room - need) / bucket) if need <= room else -1
                if fits < 0:
                    break
                reached = best[begin, : fits + 1] + again_s
                if stop == n:
                    at = int(reached.argmin())
                    end = min(end, (float(reached[at]), begin, at))
                    break
                size, work = self.saved[stop], self.work[stop]
                for letter, cost_s, added in (
                    (KEEP, 0.0, fixed + size),
                    (OFFLOAD, self.move_s[stop], fixed),
                ):
                    limit = int((room - work - size) / bucket) + 1 if room > work + size else 0
                    shift = round(added / bucket)
                    count = min(len(reached), limit, BUCKETS + 1 - shift)
                    if count <= 0:
                        continue
                    into = slice(shift, shift + count)
                    total = reached[:count] + cost_s
                    better = total < best[stop + 1, into]
                    best[stop + 1, into][better] = total[better]
                    came[stop + 1, into][better] = begin * (BUCKETS + 1) + index[:count][better]
                    closed_by[stop + 1, into][better] = ord(letter)
        at_end = int(best[n].argmin())
        end = min(end, (float(best[n, at_end]), n, at_end))
        if not np.isfinite(end[0]):
            return None
        return self._spelled(end[1], end[2], came, closed_by)

    def _spelled(self, stop: int, bucket: int, came: np.ndarray, closed_by: np.ndarray) -> str:
        letters = [RECOMPUTE] * len(self.groups)
        while stop > 0:
            letters[stop - 1] = chr(closed_by[stop, bucket])
            stop, bucket = divmod(int(came[stop, bucket]), BUCKETS + 1)
        per_unit = [KEEP] * self.num_units
        for group, letter in zip(self.groups, letters, strict=True):
            for unit in group:
                per_unit[unit] = letter
        return "".join(per_unit)


def _tied(bounds: Bounds) -> list[list[int]]:
    """Layers that can be made again together only, in the order of their first operators."""
    step = bounds.simulator.lifetimes
    leader = list(range(len(step.units)))

    def find(unit: int) -> int:
        while leader[unit] != unit:
            unit = leader[unit]
        return unit

    for number, _, sources in bounds.simulator.delicate:
        for source in sources:
            one, other = (find(step.ops[step.values[v].op].unit) for v in (number, source))
            leader[max(one, other)] = min(one, other)
    groups: dict[int, list[int]] = {}
    for unit in range(len(step.units)):
        groups.setdefault(find(unit), []).append(unit)
    return [groups[unit] for unit in sorted(groups)]
