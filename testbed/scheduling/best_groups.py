"""The exact dynamic program over groups of neighbours on one channel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from testbed.prediction.backward import Backward
from testbed.prediction.costs import times_s
from testbed.prediction.link import Link


def optimal_stops(backward: Backward, link: Link) -> list[int]:
    """Stops of groups whose last message ends as early as it can on one channel.

        E[0] = 0;  E[j] = min over i < j of max(E[i], R_j) + T(Q_j - Q_i)

    R_j: readiness by backward position, Q_j: bytes of the first j. A group of several dtypes is one
    message per dtype, each with a start-up of its own, in the order in which they get ready:

        e_0 = E[i];  e_d = max(e_{d-1}, R of the dtype's last gradient) + T(bytes of the dtype)

    and E[j] is the least of the last e_d. Exact among contiguous groups for any T, because the end
    is monotone in E[i]; O(L^2) time for each dtype, vectorised over i. Of equal candidates the
    longest last group wins.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=4, seconds_per_byte=1)
        >>> optimal_stops(Backward((2, 4, 7, 10, 15), (3, 4, 1, 1, 1)), link)
        [2, 5]
    """
    prefixes = {kind: np.array(_prefix(backward, kind)) for kind in set(_dtypes(backward))}
    end_s = np.zeros(len(backward) + 1)
    chosen = [0] * (len(backward) + 1)
    last_of: dict[str, int] = {}
    for j, kind in enumerate(_dtypes(backward), start=1):
        last_of.pop(kind, None)  # the order of the keys is that of the last gradients
        last_of[kind] = j
        ends_s = end_s[:j].copy()
        for other, last in last_of.items():
            sizes = prefixes[other][j] - prefixes[other][:last]
            started_s = np.maximum(ends_s[:last], backward.ready_s[last - 1])
            ends_s[:last] = started_s + times_s(link, sizes)
        chosen[j] = int(ends_s.argmin())
        end_s[j] = ends_s[chosen[j]]
    return _backtrack(chosen)


def optimal_stops_plain(backward: Backward, link: Link) -> list[int]:
    """The same by plain loops; the twin that `optimal_stops` is compared with."""
    end_s = [0.0]
    chosen = [0]
    for j in range(1, len(backward) + 1):
        ends = [end_after_s(end_s[i], backward, i, j, link) for i in range(j)]
        chosen.append(min(range(j), key=ends.__getitem__))
        end_s.append(ends[chosen[j]])
    return _backtrack(chosen)


def end_after_s(free_s: float, backward: Backward, start: int, stop: int, link: Link) -> float:
    """When the messages of the group start .. stop - 1 have ended, the channel free at `free_s`."""
    dtypes = _dtypes(backward)
    last_of = {dtypes[position]: position for position in range(start, stop)}
    for dtype, last in sorted(last_of.items(), key=lambda item: item[1]):
        members = [p for p in range(start, stop) if dtypes[p] == dtype]
        size = sum(backward.num_bytes[p] for p in members)
        free_s = max(free_s, backward.ready_s[last]) + link.time_s(size)
    return free_s


def _dtypes(backward: Backward) -> tuple[str, ...]:
    return backward.dtypes or ("",) * len(backward)


def _prefix(backward: Backward, kind: str) -> list[float]:
    """Bytes of this dtype in the first 0, 1, ..., L positions."""
    sizes = zip(_dtypes(backward), backward.num_bytes, strict=True)
    return list(accumulate((float(s) if d == kind else 0.0 for d, s in sizes), initial=0.0))


def _backtrack(chosen: Sequence[int]) -> list[int]:
    stops: list[int] = []
    position = len(chosen) - 1
    while position > 0:
        stops.append(position)
        position = chosen[position]
    return stops[::-1]
