"""The best groups of neighbours: exact on one channel, searched for on several."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.errors import UsageError
from testbed.prediction.backward import Backward
from testbed.prediction.link import Link
from testbed.prediction.trace import Trace
from testbed.scheduling.asc_wfbp import admit
from testbed.scheduling.best_groups import optimal_stops
from testbed.scheduling.concurrent import MAX_EXHAUSTIVE, best_concurrent
from testbed.scheduling.grouping import plan_of
from testbed.scheduling.plan import Plan
from testbed.scheduling.protocol import SchedulerKind


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

    On one channel no grouping whatever, contiguous or not, ends earlier under this cost model; with
    several dtypes no contiguous one, each group being one message per dtype. On several channels
    the result is never later than `asc-wfbp` with as many channels, nor than one channel; with
    several dtypes neither is certain: that search does not foresee how groups are cut.
    """
    backward = Backward.of(trace)
    stops = optimal_stops(backward, link)
    if options.channels == 1 or not stops:
        reason = f"{len(stops)} messages, exact for contiguous groups on one channel"
        return plan_of("optimal", trace, stops, reason=reason)
    found = best_concurrent(backward, link, options.channels, stops)
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


OPTIMAL = SchedulerKind(
    name="optimal",
    summary="exact dynamic program over contiguous groups (channels=1; more: local search)",
    options=OptimalOptions,
    plan=plan_optimal,
)
