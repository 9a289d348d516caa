"""What messages cost the thread that computes: o of LogP, charged to compute; pure.

The link's own time a + b M does not hold it: it is measured with all messages submitted beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from testbed.base.link import Link


@dataclass(frozen=True)
class Host:
    """The thread that submits messages and takes their results.

    Attributes:
        submit_s: its processor time to submit one message, o.
        landing_s: its processor time to take one result, o'.
        launches: a device computes by itself, as that of a replay does; the thread only launches
            its work, so that a message delays compute only where the thread falls behind. Else the
            thread computes, and stands still for each message.

    Reference:
        Culler et al., 1993, PPoPP (LogP). Departs: the two halves of o are different numbers, and
        the gap g is part of the link's start-up time.
    """

    submit_s: float = 0.0
    landing_s: float = 0.0
    launches: bool = False

    @classmethod
    def of(cls, link: Link, *, launches: bool = False) -> Host:
        """With the link's processor times; among one worker nothing is sent."""
        if link.num_workers == 1:
            return cls(launches=launches)
        return cls(link.submit_s, link.landing_s, launches)

    def submitted_s(self, ready_s: Sequence[float]) -> list[float]:
        """When each message has been submitted, in the order in which they become ready.

            s_k = R_k + k o                the thread computes: what is behind a message is late
            s_k = max(s_(k-1), R_k) + o    the thread launches

        Args:
            ready_s: R, when the last gradient of each message would be ready without messages;
                equal ones are submitted in their own order.

        Example:
            >>> Host(submit_s=1.0).submitted_s([2.0, 9.0])
            [3.0, 11.0]
            >>> Host(submit_s=1.0, launches=True).submitted_s([2.0, 9.0])
            [3.0, 10.0]
        """
        done_s, free_s = list(ready_s), 0.0
        if self.submit_s == 0:
            return done_s
        ordered = sorted(range(len(ready_s)), key=ready_s.__getitem__)
        for number, index in enumerate(ordered, start=1):
            behind_s = free_s if self.launches else 0.0
            before_s = 0.0 if self.launches else (number - 1) * self.submit_s
            free_s = max(behind_s, ready_s[index] + before_s) + self.submit_s
            done_s[index] = free_s
        return done_s

    def computed_s(self, backward_s: float, submitted_s: Sequence[float]) -> float:
        """When backward has ended and all of its messages have been submitted."""
        if self.submit_s == 0:
            return backward_s
        if self.launches:
            return max(backward_s, *submitted_s) if submitted_s else backward_s
        return backward_s + len(submitted_s) * self.submit_s

    def landed_s(self, now_s: float, ends_s: Iterable[float]) -> float:
        """When the thread, free at `now_s`, has taken these results.

            l_k = max(l_(k-1), E_k) + o'

        Args:
            now_s: l_0.
            ends_s: E, when each of the messages has ended; taken in the order of their ends.

        Example:
            >>> Host(landing_s=1.0).landed_s(4.0, [9.0, 2.0, 9.5])
            11.0
        """
        for end_s in sorted(ends_s):
            now_s = max(now_s, end_s) + self.landing_s
        return now_s
