"""The scaling factor of a grouping, and which of its terms costs what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from testbed.prediction.backward import Backward, serial_end_s
from testbed.prediction.costs import phases_s
from testbed.prediction.link import Link
from testbed.prediction.trace import Trace
from testbed.units import format_seconds


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


def exposed_by_backlog_s(backward: Backward, stops: Sequence[int], link: Link) -> float:
    """The exposed time by the work that waits at each message's readiness.

        V_0 = 0;  V_k = max(0, V_{k-1} + T(S_k) - (c_{k+1} - c_k));  exposed = V_{K-1} + T(S_K)

    The same number as E - t_b of the recursion, told as a queue; the twin of `scaling`.
    """
    if not stops:
        return 0.0
    ready_s, sizes = backward.group_ready_s(stops), backward.group_sizes(stops)
    waiting_s = 0.0
    for k in range(len(stops) - 1):
        arriving_s = waiting_s + link.time_s(sizes[k])
        waiting_s = max(0.0, arriving_s - (ready_s[k + 1] - ready_s[k]))
    return waiting_s + link.time_s(sizes[-1])
