"""The exact dynamic program over groups of neighbours on one channel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from testbed.prediction.backward import Backward
from testbed.prediction.costs import times_s
from testbed.prediction.link import Link


def optimal_stops(backward: Backward, link: Link) -> list[int]:
    """Stops of groups whose last message ends as early as it can on one channel.

        E[0] = 0;  E[j] = min over i < j of max(E[i], R_j) + T(Q_j - Q_i)

    R_j: readiness by backward position, Q_j: bytes of the first j. Exact for any T, because the
    end is monotone in E[i]; O(L^2) time, vectorised over i. Of equal candidates the longest last
    group wins.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=4, seconds_per_byte=1)
        >>> optimal_stops(Backward((2, 4, 7, 10, 15), (3, 4, 1, 1, 1)), link)
        [2, 5]
    """
    prefix = np.array(backward.prefix_bytes, dtype=np.float64)
    end_s = np.zeros(len(backward) + 1)
    chosen = [0] * (len(backward) + 1)
    for j, ready in enumerate(backward.ready_s, start=1):
        candidates = np.maximum(end_s[:j], ready) + times_s(link, prefix[j] - prefix[:j])
        chosen[j] = int(candidates.argmin())
        end_s[j] = candidates[chosen[j]]
    return _backtrack(chosen)


def optimal_stops_plain(backward: Backward, link: Link) -> list[int]:
    """The same by plain loops; the twin that `optimal_stops` is compared with."""
    prefix = backward.prefix_bytes
    end_s = [0.0]
    chosen = [0]
    for j, ready in enumerate(backward.ready_s, start=1):
        ends = [max(end_s[i], ready) + link.time_s(prefix[j] - prefix[i]) for i in range(j)]
        chosen.append(min(range(j), key=ends.__getitem__))
        end_s.append(ends[chosen[j]])
    return _backtrack(chosen)


def _backtrack(chosen: Sequence[int]) -> list[int]:
    stops: list[int] = []
    position = len(chosen) - 1
    while position > 0:
        stops.append(position)
        position = chosen[position]
    return stops[::-1]
