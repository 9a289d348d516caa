"""A trace as the channel sees it: gradients in the order in which backward makes them ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from testbed.prediction.link import Link
from testbed.prediction.trace import Trace


@dataclass(frozen=True)
class Backward:
    """Positions 0 .. L - 1 in backward order: position 0 is the last tensor of the forward order.

    Attributes:
        ready_s: when each gradient is ready, from the start of backward; never decreases.
        num_bytes: of each gradient.
        dtypes: of each gradient; empty = one for all.
    """

    ready_s: tuple[float, ...]
    num_bytes: tuple[int, ...]
    dtypes: tuple[str, ...] = ()

    @classmethod
    def of(cls, trace: Trace) -> Backward:
        """The trace in backward order."""
        return cls(
            tuple(reversed(trace.ready_s())),
            tuple(t.num_bytes for t in reversed(trace.tensors)),
            tuple(t.dtype for t in reversed(trace.tensors)),
        )

    def __len__(self) -> int:
        return len(self.ready_s)

    @property
    def prefix_bytes(self) -> list[int]:
        """Bytes of the first 0, 1, ..., L positions."""
        return list(accumulate(self.num_bytes, initial=0))

    def group_sizes(self, stops: Sequence[int]) -> list[int]:
        """Bytes of the groups that end before these positions."""
        prefix = self.prefix_bytes
        return [prefix[j] - prefix[i] for i, j in zip([0, *stops], stops, strict=False)]

    def group_ready_s(self, stops: Sequence[int]) -> list[float]:
        """When the last member of each group is ready."""
        return [self.ready_s[stop - 1] for stop in stops]


def serial_s(
    ready_s: Sequence[float], num_bytes: Sequence[float], link: Link
) -> list[tuple[float, float]]:
    """Start and end of messages that travel one after another on one channel.

        s_k = max(E_{k-1}, c_k);  E_k = s_k + T(S_k);  E_0 = 0

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=4, seconds_per_byte=1)
        >>> serial_s([4, 15], [7, 3], link)
        [(4, 15), (15, 22)]
    """
    spans: list[tuple[float, float]] = []
    free_s = 0.0
    for ready, size in zip(ready_s, num_bytes, strict=True):
        start_s = max(free_s, ready)
        free_s = start_s + link.time_s(size)
        spans.append((start_s, free_s))
    return spans


def serial_end_s(backward: Backward, stops: Sequence[int], link: Link) -> float:
    """End of the last of these groups on one channel, from the start of backward."""
    spans = serial_s(backward.group_ready_s(stops), backward.group_sizes(stops), link)
    return spans[-1][1] if spans else 0.0
