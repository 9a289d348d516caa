"""What each message of a step adds to the time that its channel is busy; pure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from testbed.base.types import Event, Op

SHORTEST_S = 1e-7  # between two moments that the clock cannot tell apart

# Of which ops so many make a sum.
_SUMS_IN_ONE = {Op.ALL_REDUCE.value: 1, Op.FOLD.value: 2, Op.SPREAD.value: 2}

# Step, key, bytes and seconds of each message.
Samples = list[tuple[int, str, int, float]]


def added_s(events: Sequence[Event]) -> Samples:
    """Step, key, bytes and seconds of each sum, in the order in which they ended.

        t_i = e_i - max(e_(i-1), s_i),  twice that for a half of a sum (fold or spread)

    e_i the end of the i-th exchange of its channel, s_i when this rank submitted it: the time
    during which nothing else kept the channel from it. Starts and ends in between belong to it,
    and so does a wait for ranks that submitted it later.

    Example:
        >>> times = (("a", 1, 3), ("b", 2, 4))
        >>> events = [Event("all-reduce", k, 0, 0, 8, s, s, e) for k, s, e in times]
        >>> [(key, time_s) for _, key, _, time_s in added_s(events)]
        [('a', 2), ('b', 1)]
    """
    ended: dict[int, float] = {}
    added: Samples = []
    for event in sorted(events, key=attrgetter("ended_s")):
        begun_s = max(ended.get(event.channel, event.submitted_s), event.submitted_s)
        ended[event.channel] = event.ended_s
        if event.op in _SUMS_IN_ONE and event.num_bytes:
            time_s = _SUMS_IN_ONE[event.op] * max(event.ended_s - begun_s, SHORTEST_S)
            added.append((event.step, event.key, event.num_bytes, time_s))
    return added


def longest_s(ranks: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """For each step the times of the rank whose messages take the longest, all together.

    While one rank waits for another to submit, the channel is taken on it and idle on the other.
    A model in which all ranks compute alike knows no such wait, so that it belongs to the messages,
    whichever rank it was that waited. Sums of one rank telescope: none is longer than the step.

    Args:
        ranks: seconds of each message, for each step of each rank.

    Example:
        >>> longest_s([[[3.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [2.0, 1.5]]])
        [[3.0, 1.0], [2.0, 1.5]]
    """
    return [list(max(step, key=sum)) for step in zip(*ranks, strict=True)]
