"""What each factor costs that keeps n workers from being n times as fast as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from testbed.prediction.backward import Backward, serial_s
from testbed.prediction.link import Link
from testbed.prediction.trace import Trace


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
        overlap_slowdown: eps; from the first message's departure on, backward takes 1 + eps times
            as long (memory, caches and cores are shared).

    Example:
        >>> from testbed.prediction.trace import TraceTensor
        >>> tensor = TraceTensor(name="w", num_elements=1, dtype="uint8", forward_s=1, backward_s=4)
        >>> trace = Trace(name="t", device="x", batch_size=1, tensors=(tensor, tensor))
        >>> link = Link(backend="x", num_workers=2, latency_s=2, seconds_per_byte=1)
        >>> factors(trace, [1, 2], link)
        Factors(iteration_s=13.0, compute_s=10, startup_s=2.0, bandwidth_s=1.0, head_delay_s=0.0, \
tail_s=3.0, slowdown_s=0.0)

    Reference:
        Liu et al., 2022, WWW (OSF), names these factors; its text was not at hand, and measuring
        each by leaving it out is ours.
    """
    backward = Backward.of(trace)
    slowed = _slowed(backward, stops, overlap_slowdown)
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


def _slowed(backward: Backward, stops: Sequence[int], overlap_slowdown: float) -> Backward:
    if not stops or overlap_slowdown == 0:
        return backward
    first_s = backward.group_ready_s(stops)[0]
    ready_s = tuple(
        r if r <= first_s else first_s + (r - first_s) * (1 + overlap_slowdown)
        for r in backward.ready_s
    )
    return Backward(ready_s, backward.num_bytes)


def _without(link: Link, latency: bool) -> Link:
    change = {"latency_s": 0.0} if latency else {"seconds_per_byte": 0.0}
    pieces = link.pieces and tuple(msgspec.structs.replace(p, **change) for p in link.pieces)
    return msgspec.structs.replace(link, pieces=pieces, **change)
