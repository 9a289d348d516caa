"""Horovod's rule of tensor fusion applied to a trace: simulated ticks pack what is ready."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import msgspec

from testbed.base.axes import SchedulerFacts
from testbed.base.errors import UsageError
from testbed.base.knobs import Range
from testbed.base.link import Link
from testbed.base.parts import RECONSTRUCTION, Part
from testbed.base.plan import Plan, is_period
from testbed.base.trace import Trace
from testbed.prediction.timeline import Backward, Ticks
from testbed.scheduling.build import close_before_exceed, plan_of

MIB = 1 << 20


@dataclass(frozen=True)
class CycleOptions:
    """Options of `cycle`.

    Attributes:
        mib: largest message; a tensor above it travels alone.
        ms: time between ticks, 0.001 or more; 0 = whenever the loop is free.
        blocking: the loop waits for its messages before it ticks again (a backend that works in
            the loop's own thread); 0 = messages are handed on (a device stream).
    """

    mib: float = 128.0
    ms: float = 1.0
    blocking: bool = True

    def __post_init__(self) -> None:
        if not self.mib >= 0:
            raise UsageError(
                f"cycle: mib is {self.mib:g}; expected a number of 0 or more, as cycle:mib=128"
            )
        if not is_period(self.ms * 1e-3):
            raise UsageError(
                f"cycle: ms is {self.ms:g}; expected 0 (no waiting) or a finite number from 0.001 "
                "(1 us) on, as cycle:ms=1"
            )

    @property
    def ticks(self) -> Ticks:
        """When the loop looks for ready gradients."""
        return Ticks(self.ms * 1e-3, self.blocking)


def cycle_stops(backward: Backward, link: Link, limit_bytes: float, ticks: Ticks) -> list[int]:
    """Stops of the groups that a loop with these ticks packs.

    Args:
        backward: ready times (s) and sizes (bytes) of the gradients, in backward order.
        link: gives the time of a message, for which a blocking loop waits.
        limit_bytes: of a message; a larger tensor travels alone.
        ticks: when the loop looks for ready gradients.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=4, seconds_per_byte=1)
        >>> backward = Backward((2, 4, 7, 10, 15), (3, 4, 1, 1, 1))
        >>> cycle_stops(backward, link, 4, Ticks(5, True))
        [1, 2, 5]
    """
    stops: list[int] = []
    done, next_s, free_s = 0, 0.0, 0.0
    while done < len(backward):
        tick_s = ticks.at_or_after(next_s, backward.ready_s[done])
        until = bisect_right(backward.ready_s, tick_s)
        sizes = backward.num_bytes[done:until]
        packed = close_before_exceed(sizes, limit_bytes)
        for start, stop in zip([0, *packed], packed, strict=False):
            free_s = max(free_s, tick_s) + link.time_s(sum(sizes[start:stop]))
        stops += [done + stop for stop in packed]
        done = until
        if ticks.blocking:
            next_s = max(tick_s + ticks.period_s, free_s)
    return stops


def plan_cycle(trace: Trace, link: Link, options: CycleOptions) -> Plan:
    """The messages that Horovod's background loop would form on this trace, as a fixed plan.

    A run does not tick and does not negotiate: it sends these messages, each when it is complete.

        tick theta: pack all ready, unsent gradients; close a message before it exceeds mib 2^20
        next tick:  theta + ms / 1000; if blocking, max(theta + ms / 1000, end of its messages)
        start of message k: max(E_{k-1}, theta)

    Args:
        trace: sizes (bytes) and backward times (s).
        link: gives T(M), for which a blocking loop waits.
        options: `mib` in MiB, `ms` in milliseconds.

    Raises:
        UsageError: `mib` is below 0, or `ms` is neither 0 nor finite and 0.001 or more.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2, 3, 3, 5], num_elements=[3, 4, 1, 1, 1])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> plan = make_plan("cycle:ms=5000", trace, link)
        >>> [[part.tensor for part in message.parts] for message in plan.messages]
        [[4, 3], [2, 1, 0]]

    Reference:
        Sergeev and Del Balso, 2018, arXiv 1802.05799, and Horovod's documentation of tensor fusion
        (today 128 MiB and 1 ms; earlier 64 MiB and 5 ms). Departs, a reconstruction: Horovod's
        loop runs on every rank, agrees with the others at each tick on what all have ready, and
        forms its messages anew in every step; here the trace decides once, and the cost of agreeing
        is left out. The phase of the ticks is ours: the first is the start of backward. A group of
        several dtypes counts as one message, and travels as one for each.
    """
    stops = cycle_stops(Backward.of(trace), link, options.mib * MIB, options.ticks)
    how = "waits for its messages" if options.blocking else "hands its messages on"
    every = f"simulated ticks every {options.ms:g} ms"
    reason = f"{len(stops)} messages at {every} of a loop that {how}"
    plan = plan_of("cycle", trace, stops, reason=reason)
    return msgspec.structs.replace(
        plan, tick_s=options.ticks.period_s, tick_blocking=options.blocking
    )


CYCLE = Part(
    name="cycle",
    summary="Horovod's rule applied to a trace: simulated ticks decide once (mib=128,ms=1)",
    origin=RECONSTRUCTION,
    build=plan_cycle,
    options=CycleOptions,
    facts=lambda options: SchedulerFacts(tried=("",)),
    knobs=lambda options: {"mib": Range(1, 64), "ms": Range(1, 100)},  # as Horovod's autotuner
)
