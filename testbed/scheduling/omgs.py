"""OMGS: merging for top-k messages, where selection takes time as well as communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log2
from typing import Literal

import msgspec

from testbed.base.axes import SchedulerFacts
from testbed.base.errors import UsageError
from testbed.base.knobs import no_knobs
from testbed.base.link import Link
from testbed.base.parts import PUBLISHED, Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.algorithms import Algorithm, algorithm_by, parse_algorithm, round_phases_s
from testbed.prediction.codec import RoundCost
from testbed.prediction.timeline import Backward
from testbed.scheduling.build import plan_of

# What planners for sparse messages take selecting and gathering to cost.

PAIR_BYTES = 8  # a value and an index
VALUE_BYTES = 4


@dataclass(frozen=True)
class SparseCost:
    """Times of a top-k message of p elements, by the law of the papers.

        t_s(p) = g p log2 p;  t_c(p, rho) = an all-gather of min(8 rho p, 4 p) bytes

    Attributes:
        link: measured with dense sums.
        algorithm: that its backend runs.
        select_s: g, seconds per element and level.

    Example:
        >>> link = Link(backend="gloo", num_workers=8, latency_s=0.01, seconds_per_byte=1e-9)
        >>> cost = SparseCost.of(link, select_ns=0.219)
        >>> round(cost.select_time_s(10**6) * 1e3, 2)  # ms
        4.37
    """

    link: Link
    algorithm: Algorithm
    select_s: float

    @classmethod
    def of(cls, link: Link, select_ns: float) -> SparseCost:
        """On a link, by its algorithm (`algorithm_by`).

        Raises:
            UsageError: a negative or infinite time.
        """
        if not 0 <= select_ns < float("inf"):
            raise UsageError(
                f"select_ns is {select_ns:g}; expected nanoseconds per element and level, 0 or "
                "more, such as 0.2"
            )
        return cls(link, parse_algorithm(algorithm_by(link)), select_ns * 1e-9)

    def select_time_s(self, num_elements: float) -> float:
        """t_s(p)."""
        return self.select_s * num_elements * log2(num_elements) if num_elements > 1 else 0.0

    def phases_s(self, num_elements: float, ratio: float) -> tuple[float, float]:
        """Start-up and transfer time of t_c(p, rho)."""
        if num_elements <= 0:
            return 0.0, 0.0
        sent = min(PAIR_BYTES * ratio, VALUE_BYTES) * num_elements
        return round_phases_s(RoundCost(form="gather", num_bytes=sent), self.link, self.algorithm)

    def exchange_time_s(self, num_elements: float, ratio: float) -> float:
        """t_c(p, rho)."""
        return sum(self.phases_s(num_elements, ratio))


Cost = Callable[[float], float]


@dataclass(frozen=True)
class OmgsOptions:
    """Options of `omgs`.

    Attributes:
        ratio: share of its elements that each message sends, 0 < ratio <= 1.
        rule: `paper`, or `exact`: the groups whose last message ends first when selection has a
            thread of its own, as the engine's does.
        select_ns: g of t_s(p) = g p log2 p, in nanoseconds (0.219 on a P102-100, 0.5 on a V100, as
            published).
    """

    ratio: float = 0.01
    rule: Literal["paper", "exact"] = "paper"
    select_ns: float = 0.219

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise UsageError(
                f"omgs: ratio is {self.ratio:g}; expected 0 < ratio <= 1; for 1 % write 0.01"
            )


def omgs_stops(
    backward_s: Sequence[float], sizes: Sequence[float], select_s: Cost, exchange_s: Cost
) -> list[int]:
    """Stops of the paper's groups; selection holds up the backward pass.

        tau_s(l) = tau_b(l) + t_b(l);  tau_b(l-1) = tau_s(l) + t_s(l)
        tau_c(l) = max(tau_c(l+1) + t_c(l+1), tau_s(l) + t_s(l))
        merge l into l-1 iff t_w < t_save:
        t_w    = t_b(l-1) + t_s(p_l + p_{l-1}) - t_s(p_l) - t_s(p_{l-1})
                 - (tau_c(l) - tau_s(l) - t_s(l))
        t_save = t_c(p_l) + t_c(p_{l-1}) - t_c(p_l + p_{l-1})

    Args:
        backward_s: time of each gradient, in backward order.
        sizes: its elements.
        select_s: t_s.
        exchange_s: t_c.

    Example:
        >>> times = {10: 2, 20: 1, 30: 3.5}
        >>> costs = {10: 5, 20: 6, 30: 9}
        >>> omgs_stops([4, 3], [20, 10], times.__getitem__, costs.__getitem__)
        [1, 2]
    """
    stops: list[int] = []
    size = now_s = free_s = 0.0
    for position, own in enumerate(sizes):
        size += own
        now_s += backward_s[position]  # tau_s of the open group, were it closed here
        last = position + 1 == len(sizes)
        start_s = max(free_s, now_s + select_s(size))
        if not last:
            after = sizes[position + 1]
            waits_s = (
                backward_s[position + 1]
                + select_s(size + after)
                - select_s(size)
                - select_s(after)
                - (start_s - now_s - select_s(size))
            )
            saves_s = exchange_s(size) + exchange_s(after) - exchange_s(size + after)
            if waits_s < saves_s:
                continue
        stops.append(position + 1)
        free_s = start_s + exchange_s(size)
        now_s += select_s(size)
        size = 0.0
    return stops


def exact_stops(
    ready_s: Sequence[float], sizes: Sequence[float], select_s: Cost, exchange_s: Cost
) -> list[int]:
    """Stops of the groups whose last message ends first, selection on a thread of its own.

        e_k = max(e_{k-1}, c_k) + t_s(p_k);  E_k = max(E_{k-1}, e_k) + t_c(p_k)

    For each position all pairs (e, E) are kept that no other one beats in both; both are monotone
    in their predecessors, so that the best end is among them. Exact among groups of neighbours.

    Args:
        ready_s: when each gradient is ready, in backward order.
        sizes: its elements.
        select_s: t_s.
        exchange_s: t_c.

    Example:
        >>> exact_stops([2, 4, 7, 10, 15], [3, 4, 1, 1, 1], lambda p: 0.0, lambda p: 4.0 + p)
        [2, 5]
    """
    total = list(accumulate(sizes, initial=0.0))
    fronts: list[list[_Ended]] = [[_Ended(0.0, 0.0, ())]]
    for stop in range(1, len(sizes) + 1):
        found = []
        for start in range(stop):
            size = total[stop] - total[start]
            selects_s, sends_s = select_s(size), exchange_s(size)
            for before in fronts[start]:
                selected_s = max(before.selected_s, ready_s[stop - 1]) + selects_s
                sent_s = max(before.sent_s, selected_s) + sends_s
                found.append(_Ended(selected_s, sent_s, (*before.stops, stop)))
        fronts.append(_unbeaten(found))
    return list(min(fronts[-1], key=lambda e: e.sent_s).stops)


@dataclass(frozen=True)
class _Ended:
    selected_s: float
    sent_s: float
    stops: tuple[int, ...]


def _unbeaten(found: Sequence[_Ended]) -> list[_Ended]:
    """Those that no other one beats in both times, the earliest selected first."""
    kept: list[_Ended] = []
    for each in sorted(found, key=lambda e: (e.selected_s, e.sent_s, len(e.stops))):
        if not kept or each.sent_s < kept[-1].sent_s:
            kept.append(each)
    return kept


def plan_omgs(trace: Trace, link: Link, options: OmgsOptions) -> Plan:
    """Merged groups for top-k messages, each of which costs a selection t_s and an all-gather t_c.

        tau_s(l) = tau_b(l) + t_b(l);   tau_b(l-1) = tau_s(l) + t_s(l)
        tau_c(l) = max(tau_c(l+1) + t_c(l+1), tau_s(l) + t_s(l))
        merge l into l-1  iff  t_w < t_save       (both in `omgs_stops`)

    The rule looks one gradient ahead and is not optimal, as MG-WFBP's; `rule=exact` is, for
    selection on a thread of its own. Where selection is slow, little is merged: its time grows
    faster than its size.

    Args:
        trace: sizes (elements) and backward times (s).
        link: gives the time of a gather through its backend's algorithm.
        options: ratio, rule, and selection time in ns.

    Raises:
        UsageError: a ratio outside 0 < ratio <= 1, or a negative `select_ns`.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2e-3, 2e-3], num_elements=[10**6, 10**6])
        >>> link = Link(backend="gloo", num_workers=8, latency_s=9e-3, seconds_per_byte=1e-9)
        >>> plan = make_plan("omgs:ratio=0.001", trace, link)
        >>> [(m.ratio, [part.tensor for part in m.parts]) for m in plan.messages]
        [(0.001, [1, 0])]

    Reference:
        Shi et al., 2020, INFOCOM (OMGS-SGD). Departs: the gather's cost is that of this link's
        algorithm, n - 1 payloads of 8 bytes for each selected element, instead of 2 (a + 4 b rho p
        P); the engine selects beside the backward pass, not within it; `rule=exact` is ours.
    """
    cost = SparseCost.of(link, options.select_ns)

    def exchange_s(size: float) -> float:
        return cost.exchange_time_s(size, options.ratio)

    sizes = [float(t.num_elements) for t in reversed(trace.tensors)]
    if options.rule == "exact":
        ready_s = Backward.of(trace).ready_s
        stops = exact_stops(ready_s, sizes, cost.select_time_s, exchange_s)
    else:
        backward_s = [t.backward_s for t in reversed(trace.tensors)]
        stops = omgs_stops(backward_s, sizes, cost.select_time_s, exchange_s)
    plan = plan_of("omgs", trace, stops, reason=f"{len(stops)} messages at ratio {options.ratio:g}")
    return msgspec.structs.replace(
        plan,
        messages=tuple(msgspec.structs.replace(m, ratio=options.ratio) for m in plan.messages),
    )


OMGS = Part(
    name="omgs",
    summary="OMGS: merging for top-k messages (ratio, rule=paper|exact, select_ns)",
    origin=PUBLISHED,
    build=plan_omgs,
    options=OmgsOptions,
    facts=lambda options: SchedulerFacts(sparse=True),
    knobs=no_knobs,  # the ratio changes what is trained
)
