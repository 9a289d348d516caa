"""PACE's fusion: a dynamic program over contiguous groups, with the preemptive schedule as oracle.

    F[j] = argmin over i < j of Oracle(F[i] + fuse(i+1 .. j) + the tensors behind j, unfused)

Of groups that come to the same time the one is kept whose prefix alone ends earliest, then the
longest. `fuse_plainly` asks the oracle anew each time, O(n^2 W log n); `fuse` finds the same values
from bounds over all thresholds of tails at once, and simulates only where the bounds leave doubt.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from testbed.scheduling.pace_bounds import Bounds
from testbed.scheduling.pace_oracle import Job, Tensors, finish_s
from testbed.scheduling.pace_suffix import Suffix


@dataclass(frozen=True)
class Fusion:
    """Groups of tensors in the order of their release.

    Attributes:
        stops: where each group ends, the last one n.
        values_s: the oracle's value of F[1], ..., F[n].
    """

    stops: list[int]
    values_s: list[float]

    @classmethod
    def of(cls, chosen: list[int], values_s: list[float]) -> Fusion:
        """The groups behind the choices: group (chosen[j], j] ends the best fusion of j tensors."""
        stops: list[int] = []
        stop = len(values_s)
        while stop > 0:
            stops.append(stop)
            stop = chosen[stop]
        return cls(stops[::-1], values_s)


def jobs_of(tensors: Tensors, stops: list[int]) -> list[Job]:
    """The jobs of these groups."""
    return [tensors.job(start, stop) for start, stop in pairwise([0, *stops])]


def fuse_plainly(tensors: Tensors, window: int, ideal: bool) -> Fusion:
    """The dynamic program as it is written, with an oracle call for each candidate.

    Args:
        tensors: to be grouped.
        window: most tensors of a group.
        ideal: the oracle's preemption, see `finish_s`.
    """
    count = len(tensors)
    # Segments already sent count from the compute time on; with ideal preemption none are sent.
    floor_s = 0.0 if ideal else tensors.compute_s
    best: list[list[int]] = [[]]
    values_s: list[float] = []
    for stop in range(1, count + 1):
        singles = list(range(stop + 1, count + 1))
        candidates = []
        for start in range(tensors.first_partner(stop, window), stop):
            stops = [*best[start], stop]
            value_s = finish_s(jobs_of(tensors, stops + singles), tensors.compute_s, ideal)
            alone_s = finish_s(jobs_of(tensors, stops), floor_s, ideal)
            candidates.append((value_s, alone_s, start, stops))
        chosen = min(candidates)
        best.append(chosen[3])
        values_s.append(chosen[0])
    return Fusion(best[count], values_s)


def fuse(tensors: Tensors, window: int, ideal: bool) -> Fusion:
    """The same groups, fast; see `fuse_plainly` for the arguments.

    Reference:
        Bao, Peng, Chen and Wu, 2020, INFOCOM (PACE): fusion by dynamic programming with the best
        preemptive schedule as oracle. The text was not available; free: the order of the program,
        the window, the cost and size of segments. Exact on chains with ideal preemption; with other
        forward orders or with segments it is a heuristic that never ends above the unfused oracle.
    """
    count = len(tensors)
    bounds = Bounds(tensors, ideal)
    suffix = None if ideal else Suffix(tensors)
    prefixes = {0: bounds.empty()}
    chosen, values_s = [0], []
    for stop in range(1, count + 1):
        first = tensors.first_partner(stop, window)
        jobs = [tensors.job(start, stop) for start in range(first, stop)]
        if suffix is not None:
            for start in range(first, stop):
                state = suffix.advance(start, tensors.release_s[stop - 1])
                prefixes[start] = prefixes[start].advanced(
                    state.now_s, state.worst_s, idle=not state.waiting
                )
        grown = bounds.grow([prefixes[i] for i in range(first, stop)], jobs)
        low_s, high_s = bounds.around(grown, stop)
        alone_s = bounds.alone(grown)
        order = np.lexsort((np.arange(len(jobs)), alone_s, low_s)).tolist()
        if suffix is None:
            best, value_s = order[0], float(low_s[order[0]])
        else:
            best, value_s = suffix.best(first, jobs, order, (low_s, high_s), alone_s)
            suffix.keep(first + best, stop, jobs[best], window)
        prefixes[stop] = grown.row(best)
        prefixes.pop(stop - window, None)
        chosen.append(first + best)
        values_s.append(value_s)
    return Fusion.of(chosen, values_s)
