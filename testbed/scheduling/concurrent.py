"""Groups for simultaneous messages: event simulation and local search over group boundaries.

With simultaneous messages the end of a group depends on those after it, so that no dynamic program
over prefixes is exact; what is found here is a local optimum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import msgspec

from testbed.prediction.backward import Backward
from testbed.prediction.link import Link
from testbed.scheduling.asc_wfbp import admit, asc_stops
from testbed.scheduling.best_groups import optimal_stops
from testbed.scheduling.mg_wfbp import merge_streaming

MAX_SIMULATED_MESSAGES = 200_000
"""Bound on the search's work, in messages, so that it ends in about a second on any trace."""


MAX_EXHAUSTIVE = 9
"""With so few tensors all 2^(L-1) groupings are tried."""


class Found(NamedTuple):
    """A grouping and what it comes to; the smaller of two is the better."""

    end_s: float
    num_messages: int
    num_channels: int
    stops: tuple[int, ...]


@dataclass
class _Search:
    """What is known of groupings: ends by (stops, channels), and how much work is left."""

    backward: Backward
    link: Link
    messages_left: int = MAX_SIMULATED_MESSAGES
    known: dict[tuple[tuple[int, ...], int], float] = field(default_factory=dict)

    def judge(self, stops: tuple[int, ...], num_channels: int) -> Found:
        key = (stops, num_channels)
        if key not in self.known:
            self.messages_left -= len(stops)
            ends = admit(self.backward, stops, self.link, num_channels).end_s
            self.known[key] = max(ends, default=0.0)
        return Found(self.known[key], len(stops), num_channels, stops)


def best_concurrent(
    backward: Backward, link: Link, num_channels: int, serial_stops: Sequence[int]
) -> Found:
    """The best groups for up to so many channels; exact for few tensors, else searched for."""
    if len(backward) <= MAX_EXHAUSTIVE:
        return try_all(backward, link, num_channels)
    return search_concurrent(backward, link, num_channels, serial_stops)


def try_all(backward: Backward, link: Link, num_channels: int) -> Found:
    """Every grouping on every number of channels."""
    search = _Search(backward, link)
    count = len(backward)
    groupings = (
        (*inner, count) for size in range(count) for inner in combinations(range(1, count), size)
    )
    return min(search.judge(stops, k) for stops in groupings for k in range(1, num_channels + 1))


def search_concurrent(
    backward: Backward, link: Link, num_channels: int, serial_stops: Sequence[int]
) -> Found:
    """The earliest end that local search finds.

    Starts from the papers' groupings, from `serial_stops` and from the best groups of faster
    links, on 1 .. num_channels channels; the best ones are improved by moving, removing and adding
    one boundary at a time until nothing helps or the work is done. Deterministic.

    Args:
        backward: the trace.
        link: with its law of concurrency.
        num_channels: at most so many messages at once.
        serial_stops: the optimum of one channel.
    """
    search = _Search(backward, link)
    starts = _starts(backward, link, num_channels, serial_stops)
    ranked = sorted(search.judge(stops, k) for stops in starts for k in range(1, num_channels + 1))
    best = ranked[0]
    tried: set[tuple[int, ...]] = set()
    for start in ranked:
        if search.messages_left <= 0:
            break
        if start.stops not in tried and start.num_channels > 1:
            tried.add(start.stops)
            best = min(best, _improve(search, start))
    return best


def _improve(search: _Search, found: Found) -> Found:
    improved = True
    while improved and search.messages_left > 0:
        improved = False
        for stops in _neighbours(found.stops):
            candidate = search.judge(stops, found.num_channels)
            if candidate.end_s < found.end_s:
                found, improved = candidate, True
                break
            if search.messages_left <= 0:
                break
    return found


def _neighbours(stops: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One boundary moved by a power of two, taken away, or added; the last one stays."""
    last = stops[-1]
    inner = stops[:-1]
    for index, stop in enumerate(inner):
        low = inner[index - 1] if index else 0
        high = stops[index + 1]
        step = 1
        while step < high - low:
            for moved in (stop - step, stop + step):
                if low < moved < high:
                    yield (*stops[:index], moved, *stops[index + 1 :])
            step *= 2
        yield (*stops[:index], *stops[index + 1 :])
    present = set(stops)
    for added in range(1, last):
        if added not in present:
            yield tuple(sorted((*stops, added)))


def _starts(
    backward: Backward, link: Link, num_channels: int, serial_stops: Sequence[int]
) -> list[tuple[int, ...]]:
    count = len(backward)
    found = [
        tuple(serial_stops),
        tuple(asc_stops(backward, link)),
        tuple(merge_streaming(backward, link)),
        tuple(range(1, count + 1)),
        (count,),
    ]
    for k in range(2, num_channels + 1):
        # As one channel that moves bytes as fast as k do together, with the start-ups of all or
        # with a start-up k times as short, because k of them overlap.
        for latency_s in (link.latency_s, link.latency_s / k):
            faster = msgspec.structs.replace(
                link,
                latency_s=latency_s,
                seconds_per_byte=link.seconds_per_byte * link.slowdown(k) / k,
                pieces=None,
            )
            found.append(tuple(optimal_stops(backward, faster)))
    return list(dict.fromkeys(found))
