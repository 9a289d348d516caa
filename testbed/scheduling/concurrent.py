"""Groups for simultaneous messages: event simulation and local search over group boundaries.

With simultaneous messages the end of a group depends on those after it, so that no dynamic program
over prefixes is exact; what is found here is a local optimum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from testbed.prediction.backward import Backward
from testbed.prediction.link import Link
from testbed.scheduling.asc_wfbp import admit, asc_stops
from testbed.scheduling.best_groups import optimal_stops
from testbed.scheduling.mg_wfbp import merge_streaming

MAX_SIMULATED_MESSAGES = 60_000
"""Bound on the search's work, in messages, so that it ends in about a second on any trace."""


@dataclass
class _Search:
    """What is known of groupings: ends by (stops, channels), and how much work is left."""

    backward: Backward
    link: Link
    messages_left: int = MAX_SIMULATED_MESSAGES
    known: dict[tuple[tuple[int, ...], int], float] = field(default_factory=dict)

    def end_s(self, stops: tuple[int, ...], num_channels: int) -> float:
        key = (stops, num_channels)
        if key not in self.known:
            self.messages_left -= len(stops)
            ends = admit(self.backward, stops, self.link, num_channels).end_s
            self.known[key] = max(ends, default=0.0)
        return self.known[key]


def search_concurrent(
    backward: Backward, link: Link, num_channels: int, serial_stops: Sequence[int]
) -> tuple[list[int], int]:
    """Stops and number of channels of the earliest end found.

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
    ranked = sorted(
        (search.end_s(stops, k), len(stops), stops, k)
        for stops in starts
        for k in range(1, num_channels + 1)
    )
    best = ranked[0]
    tried: set[tuple[int, ...]] = set()
    for _, _, stops, k in ranked:
        if search.messages_left <= 0:
            break
        if stops not in tried and k > 1:
            tried.add(stops)
            best = min(best, _improve(search, stops, k))
    return list(best[2]), best[3]


def _improve(
    search: _Search, stops: tuple[int, ...], num_channels: int
) -> tuple[float, int, tuple[int, ...], int]:
    end_s = search.end_s(stops, num_channels)
    improved = True
    while improved and search.messages_left > 0:
        improved = False
        for candidate in _neighbours(stops):
            if search.end_s(candidate, num_channels) < end_s:
                stops, end_s = candidate, search.end_s(candidate, num_channels)
                improved = True
                break
            if search.messages_left <= 0:
                break
    return end_s, len(stops), stops, num_channels


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
