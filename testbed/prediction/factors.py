"""Why n workers are not n times as fast as one: the cost of each factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from testbed.base.link import Link, phases_s
from testbed.base.trace import Trace
from testbed.base.units import format_seconds
from testbed.prediction.extrapolate import each_piece
from testbed.prediction.timeline import Backward, serial_end_s, serial_s


@dataclass(frozen=True)
class Factors:
    """Seconds of an iteration that would not be there without one factor, all else as it is.

    They need not add up: two factors may hide behind each other, and then neither costs anything
    alone, or hide together, and then each costs both.

    Attributes:
        iteration_s: T_n = t_f + max(t_b, E), with the slowdown.
        compute_s: t_f + t_b of one worker.
        startup_s: of all start-ups (a = 0).
        bandwidth_s: of all transfers (b = 0).
        head_delay_s: of waiting for the first message's gradients (c_1 = 0).
        tail_s: of the last message, which backward cannot hide (T(S_K) = 0).
        slowdown_s: of computing more slowly while messages are under way.
    """

    iteration_s: float
    compute_s: float
    startup_s: float
    bandwidth_s: float
    head_delay_s: float
    tail_s: float
    slowdown_s: float

    @property
    def scaling_factor(self) -> float:
        """T_1 / T_n: throughput over n times that of one worker."""
        return self.compute_s / self.iteration_s if self.iteration_s > 0 else 1.0


def factors(
    trace: Trace, stops: Sequence[int], link: Link, overlap_slowdown: float = 0.0
) -> Factors:
    """The scaling factor's terms for groups that travel one after another on one channel.

    Args:
        trace: of one worker.
        stops: backward positions at which groups end.
        link: that they travel on.
        overlap_slowdown: eps; while a message is under way, backward takes 1 + eps times as long
            (memory, caches and cores are shared).

    Example:
        >>> from testbed.base.trace import TraceTensor
        >>> tensor = TraceTensor(name="w", num_elements=1, dtype="uint8", forward_s=1, backward_s=4)
        >>> trace = Trace(name="t", device="x", batch_size=1, tensors=(tensor, tensor))
        >>> link = Link(backend="x", num_workers=2, latency_s=2, seconds_per_byte=1)
        >>> factors(trace, [1, 2], link)
        Factors(iteration_s=13.0, compute_s=10, startup_s=2.0, bandwidth_s=1.0, head_delay_s=0.0, \
tail_s=3.0, slowdown_s=0.0)

    Reference:
        After Liu et al., 2022, WWW (OSF), whose text was not at hand: which factors there are, and
        measuring each by leaving it out, is ours.
    """
    backward = Backward.of(trace)
    slowed = _slowed(backward, stops, link, overlap_slowdown)
    ends = _ends(slowed, stops, link)
    base_s = ends.iteration_s(trace.forward_s)

    def gain_s(other: _Ends) -> float:
        return base_s - other.iteration_s(trace.forward_s)

    return Factors(
        iteration_s=base_s,
        compute_s=trace.forward_s + trace.backward_s,
        startup_s=gain_s(_ends(slowed, stops, _without(link, latency=True))),
        bandwidth_s=gain_s(_ends(slowed, stops, _without(link, latency=False))),
        head_delay_s=gain_s(_ends(slowed, stops, link, first_ready_s=0.0)),
        tail_s=gain_s(ends.without_last()),
        slowdown_s=gain_s(_ends(backward, stops, link)),
    )


@dataclass(frozen=True)
class _Ends:
    backward_s: float
    end_s: tuple[float, ...]

    def iteration_s(self, forward_s: float) -> float:
        return forward_s + max((self.backward_s, *self.end_s))

    def without_last(self) -> _Ends:
        return _Ends(self.backward_s, self.end_s[:-1])


def _ends(
    backward: Backward, stops: Sequence[int], link: Link, first_ready_s: float | None = None
) -> _Ends:
    ready_s = backward.group_ready_s(stops)
    if first_ready_s is not None and ready_s:
        ready_s[0] = first_ready_s
    spans = serial_s(ready_s, backward.group_sizes(stops), link)
    whole_s = backward.ready_s[-1] if len(backward) else 0.0
    return _Ends(whole_s, tuple(end for _, end in spans))


def _slowed(
    backward: Backward, stops: Sequence[int], link: Link, overlap_slowdown: float
) -> Backward:
    """Backward of which each second beside a message takes 1 + eps."""
    if not stops or overlap_slowdown == 0:
        return backward
    stretch, ends, sizes = 1 + overlap_slowdown, set(stops), iter(backward.group_sizes(stops))
    ready_s, now_s, busy_until_s = [], 0.0, 0.0
    for position, (before_s, after_s) in enumerate(pairwise([0.0, *backward.ready_s]), start=1):
        compute_s = after_s - before_s
        beside_s = min(compute_s, max(0.0, busy_until_s - now_s) / stretch)
        now_s += beside_s * stretch + (compute_s - beside_s)
        ready_s.append(now_s)
        if position in ends:
            busy_until_s = max(busy_until_s, now_s) + link.time_s(next(sizes))
    return Backward(tuple(ready_s), backward.num_bytes)


def _without(link: Link, latency: bool) -> Link:
    return each_piece(link, lambda a, b: (0.0, b) if latency else (a, 0.0))


@dataclass(frozen=True)
class Scaling:
    """What keeps n workers from being n times as fast as one.

    Attributes:
        num_messages: K.
        scaling_factor: T_1 / T_n, throughput over n times that of one worker.
        iteration_s: T_n = t_f + max(t_b, E).
        exposed_s: E - t_b.
        startup_s: all start-ups together, K a.
        transfer_s: all transfers together, b sum(M).
        head_delay_s: backward time before the first message could leave, c_1.
        tail_s: the last message, which backward can never hide.
        best_scaling_factor: bound for this grouping, from E >= c_1 + startup + transfer and
            E >= t_b + tail.
    """

    num_messages: int
    scaling_factor: float
    iteration_s: float
    exposed_s: float
    startup_s: float
    transfer_s: float
    head_delay_s: float
    tail_s: float
    best_scaling_factor: float

    def in_words(self) -> str:
        """One line for people: the factor and what it is made of."""
        return (
            f"scaling factor {self.scaling_factor:.3f} with {self.num_messages} messages: "
            f"{format_seconds(self.exposed_s)} exposed; start-ups "
            f"{format_seconds(self.startup_s)}, transfers "
            f"{format_seconds(self.transfer_s)}, first message waits "
            f"{format_seconds(self.head_delay_s)}, last one takes {format_seconds(self.tail_s)}"
        )


def scaling(trace: Trace, stops: Sequence[int], link: Link) -> Scaling:
    """The scaling factor with overlap of a grouping on one channel.

        SF = (t_f + t_b) / (t_f + max(t_b, E_K)),  E_k = max(E_{k-1}, c_k) + a + b S_k

    Reference:
        Liu et al., 2022, WWW (OSF). The paper's text was not at hand: this recursion is what its
        abstract's terms (overlap, fusion) force. Departs: no optimizer time.
    """
    backward = Backward.of(trace)
    backward_s = backward.ready_s[-1] if len(backward) else 0.0
    end_s = serial_end_s(backward, stops, link)
    phases = [phases_s(link, size) for size in backward.group_sizes(stops)]
    startup_s, transfer_s = sum(p[0] for p in phases), sum(p[1] for p in phases)
    head_s = backward.group_ready_s(stops)[0] if stops else 0.0
    tail_s = sum(phases[-1]) if phases else 0.0
    alone_s = trace.forward_s + backward_s
    soonest_s = max(backward_s + tail_s, head_s + startup_s + transfer_s)
    iteration_s = trace.forward_s + max(backward_s, end_s)
    return Scaling(
        num_messages=len(stops),
        scaling_factor=alone_s / iteration_s if iteration_s > 0 else 1.0,
        iteration_s=iteration_s,
        exposed_s=max(0.0, end_s - backward_s),
        startup_s=startup_s,
        transfer_s=transfer_s,
        head_delay_s=head_s,
        tail_s=tail_s,
        best_scaling_factor=alone_s / (trace.forward_s + soonest_s) if iteration_s > 0 else 1.0,
    )
