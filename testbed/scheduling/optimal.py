"""The best groups of neighbours: exact on one channel, a local search on several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from typing import NamedTuple

import msgspec
import numpy as np

from testbed.base.axes import SchedulerFacts
from testbed.base.errors import UsageError
from testbed.base.knobs import Grid
from testbed.base.link import Link, times_s
from testbed.base.parts import OURS, Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.timeline import Backward
from testbed.scheduling.asc_wfbp import admit, asc_stops
from testbed.scheduling.build import plan_of
from testbed.scheduling.mg_wfbp import merge_streaming
from testbed.scheduling.processor_time import charged_stops, with_processor_time

# The exact dynamic program over groups of neighbours on one channel.


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
    """The same by loops over all pairs: the slow reference of `optimal_stops`."""
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


# Groups for simultaneous messages: event simulation and local search over group boundaries.
#
# With simultaneous messages the end of a group depends on those after it, so that no dynamic
# program over prefixes is exact; what is found here is a local optimum.

MAX_SIMULATED_MESSAGES = 200_000
"""Limit of the search, in simulated messages: about a second on any trace."""


MAX_EXHAUSTIVE = 9
"""Up to so many tensors all 2^(L-1) groupings are evaluated."""


class Grouping(NamedTuple):
    """Groups on some channels and when their last message ends; the smaller of two is better."""

    end_s: float
    num_messages: int
    num_channels: int
    stops: tuple[int, ...]


@dataclass
class _Search:
    """Ends of the groupings evaluated so far, by (stops, channels), and the work that is left."""

    backward: Backward
    link: Link
    messages_left: int = MAX_SIMULATED_MESSAGES
    ends_s: dict[tuple[tuple[int, ...], int], float] = field(default_factory=dict)

    def evaluate(self, stops: tuple[int, ...], num_channels: int) -> Grouping:
        key = (stops, num_channels)
        if key not in self.ends_s:
            self.messages_left -= len(stops)
            ends = admit(self.backward, stops, self.link, num_channels).end_s
            self.ends_s[key] = max(ends, default=0.0)
        return Grouping(self.ends_s[key], len(stops), num_channels, stops)


def best_concurrent(
    backward: Backward, link: Link, num_channels: int, serial_stops: Sequence[int]
) -> Grouping:
    """The best groups for up to so many channels; exact for few tensors, else searched for."""
    num_channels = min(num_channels, max(1, len(backward)))  # a message each is the most
    if len(backward) <= MAX_EXHAUSTIVE:
        return try_all(backward, link, num_channels)
    return search_concurrent(backward, link, num_channels, serial_stops)


def try_all(backward: Backward, link: Link, num_channels: int) -> Grouping:
    """Every grouping on every number of channels."""
    search = _Search(backward, link)
    count = len(backward)
    groupings = (
        (*inner, count) for size in range(count) for inner in combinations(range(1, count), size)
    )
    return min(search.evaluate(stops, k) for stops in groupings for k in range(1, num_channels + 1))


def search_concurrent(
    backward: Backward, link: Link, num_channels: int, serial_stops: Sequence[int]
) -> Grouping:
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
    ranked = sorted(
        search.evaluate(stops, k) for stops in starts for k in range(1, num_channels + 1)
    )
    best = ranked[0]
    tried: set[tuple[int, ...]] = set()
    for start in ranked:
        if search.messages_left <= 0:
            break
        if start.stops not in tried and start.num_channels > 1:
            tried.add(start.stops)
            best = min(best, _improve(search, start))
    return best


def _improve(search: _Search, found: Grouping) -> Grouping:
    improved = True
    while improved and search.messages_left > 0:
        improved = False
        for stops in _neighbours(found.stops):
            candidate = search.evaluate(stops, found.num_channels)
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


@dataclass(frozen=True)
class OptimalOptions:
    """Options of `optimal`.

    Attributes:
        channels: messages under way at once, at most; above 1 the answer is a local optimum.
    """

    channels: int = 1

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise UsageError(f"optimal: channels is {self.channels}; expected 1 or more")


def plan_optimal(trace: Trace, link: Link, options: OptimalOptions) -> Plan:
    """The exact dynamic program on one channel; on several, event simulation and local search.

        E[0] = 0;  E[j] = min over i < j of max(E[i], R_j) + T(Q_j - Q_i);  the answer is E[L]

    where j counts gradients in backward order and Q_j is the bytes of the first j. On one channel
    no grouping whatever, contiguous or not, ends earlier under this cost model; with several dtypes
    no contiguous one, as each group is one message per dtype. On several channels up to 9 tensors
    are tried exhaustively, more are searched; the result is never later than `asc-wfbp` with as
    many channels, nor than one channel, unless there are several dtypes: the search does not
    foresee how groups are cut. On one channel processor time of messages is part of the recursion,
    see `charged_stops`.

    Args:
        trace: sizes (bytes) and backward times (s).
        link: gives T(M), also piecewise, and the slow-down of simultaneous messages.
        options: number of channels.

    Raises:
        UsageError: `channels` is below 1.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2, 3, 3, 5], num_elements=[3, 4, 1, 1, 1])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> plan = make_plan("optimal", trace, link)
        >>> [[part.tensor for part in message.parts] for message in plan.messages]
        [[4, 3], [2, 1, 0]]

    Reference:
        The problem and its cost model are those of Shi, Chu and Li, 2021, IEEE TPDS 32(8)
        (MG-WFBP). Departs: the paper gives a rule, `mg-wfbp`; the dynamic program and the search
        are ours.
    """
    backward = Backward.of(trace)

    def charged(plan: Plan) -> Iterator[Plan]:
        if options.channels == 1 and len(set(backward.dtypes)) == 1:
            yield _serial(trace, charged_stops(backward, link, len(plan.messages)))

    return with_processor_time(
        lambda seen: _planned(trace, backward, seen, options.channels), trace, link, charged
    )


def _serial(trace: Trace, stops: Sequence[int]) -> Plan:
    reason = f"{len(stops)} messages, exact for contiguous groups on one channel"
    return plan_of("optimal", trace, stops, reason=reason)


def _planned(trace: Trace, backward: Backward, link: Link, channels: int) -> Plan:
    """The best groups where messages cost the channel alone."""
    stops = optimal_stops(backward, link)
    if channels == 1 or not stops:
        return _serial(trace, stops)
    found = best_concurrent(backward, link, channels, stops)
    exact = len(backward) <= MAX_EXHAUSTIVE
    how = "all groupings tried" if exact else "by local search over group boundaries"
    return plan_of(
        "optimal",
        trace,
        found.stops,
        channels=admit(backward, found.stops, link, found.num_channels).channel,
        num_channels=found.num_channels,
        reason=f"{found.num_messages} messages on {found.num_channels} channels, {how}",
    )


def _facts(options: OptimalOptions) -> SchedulerFacts:
    outdone = (
        "of whole messages, one at a time, within the iteration; those before it send several at "
        "once, in halves or by priority"
    )
    return SchedulerFacts(tried=("",), outdone=outdone if options.channels == 1 else "")


OPTIMAL = Part(
    name="optimal",
    summary="exact dynamic program over contiguous groups (channels=1; more: local search)",
    origin=OURS,
    build=plan_optimal,
    options=OptimalOptions,
    facts=_facts,
    knobs=lambda options: {"channels": Grid((1, 2, 4))},  # those of asc-wfbp, and one
)
