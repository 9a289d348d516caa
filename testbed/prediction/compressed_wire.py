"""What compressed messages take, and when they are under way between encoding and decoding; pure.

On several channels start-ups overlap and bytes do not: a transfer begins when the one before it has
ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from testbed.base.plan import Plan

Span = tuple[float, float]


@dataclass(frozen=True)
class MessageCost:
    """The three stages of one message, alone on the link.

    Attributes:
        encode_s: until its first round can leave.
        communication_s: from its first round's start to its last answer, work between included.
        transfer_s: of that, what its bytes take on the wire.
        decode_s: from there to the mean.
        sent_bytes: payload that a rank hands over.
        wire_bytes: through the busiest interface in one direction.
    """

    encode_s: float
    communication_s: float
    transfer_s: float
    decode_s: float
    sent_bytes: float
    wire_bytes: float


class Wire:
    """Channels whose start-ups overlap and whose transfers take turns on one wire."""

    def __init__(self, num_channels: int) -> None:
        self._channels_s = [0.0] * num_channels
        self._free_s = 0.0

    def bytes_leave_s(self, channel: int, ready_s: float, cost: MessageCost) -> float:
        """When the bytes of the next message of a channel could leave."""
        return self._begin_s(channel, ready_s) + cost.communication_s - cost.transfer_s

    def send(self, channel: int, ready_s: float, cost: MessageCost) -> Span:
        """Send the next message of a channel; returns when it starts and when it has arrived."""
        begun_s = self._begin_s(channel, ready_s)
        leave_s = self.bytes_leave_s(channel, ready_s, cost)
        self._free_s = max(self._free_s, leave_s) + cost.transfer_s
        self._channels_s[channel] = self._free_s
        return begun_s, self._free_s

    def _begin_s(self, channel: int, ready_s: float) -> float:
        return max(self._channels_s[channel], ready_s)


def sent_spans(plan: Plan, encoded_s: Sequence[float], costs: Sequence[MessageCost]) -> list[Span]:
    """When each message starts and when it has arrived, in the plan's order.

    Order `fifo`: each channel keeps its order, and of their next messages the one whose bytes could
    leave first goes. Order `priority`: of the encoded ones the most urgent begins next, on each
    channel for itself.
    """
    if plan.order == "fifo":
        return _first_come(plan, encoded_s, costs)
    spans: list[Span] = [(0.0, 0.0)] * len(encoded_s)
    for channel in range(plan.num_channels):
        mine = [i for i, m in enumerate(plan.messages) if m.channel == channel]
        for index, span in _most_urgent_first(plan, mine, encoded_s, costs):
            spans[index] = span
    return spans


def _first_come(plan: Plan, encoded_s: Sequence[float], costs: Sequence[MessageCost]) -> list[Span]:
    wire, spans = Wire(plan.num_channels), [(0.0, 0.0)] * len(costs)
    lines = [
        deque(i for i, m in enumerate(plan.messages) if m.channel == channel)
        for channel in range(plan.num_channels)
    ]
    while any(lines):
        channel = min(
            (c for c, line in enumerate(lines) if line),
            key=lambda c: wire.bytes_leave_s(c, encoded_s[lines[c][0]], costs[lines[c][0]]),
        )
        index = lines[channel].popleft()
        spans[index] = wire.send(channel, encoded_s[index], costs[index])
    return spans


def _most_urgent_first(
    plan: Plan, mine: Sequence[int], encoded_s: Sequence[float], costs: Sequence[MessageCost]
) -> list[tuple[int, Span]]:
    arrivals = sorted(mine, key=encoded_s.__getitem__)
    waiting: list[tuple[int, int]] = []
    spans: list[tuple[int, Span]] = []
    free_s, head = 0.0, 0
    while head < len(arrivals) or waiting:
        if not waiting:
            free_s = max(free_s, encoded_s[arrivals[head]])
        while head < len(arrivals) and encoded_s[arrivals[head]] <= free_s:
            heappush(waiting, (plan.messages[arrivals[head]].priority, arrivals[head]))
            head += 1
        index = heappop(waiting)[1]
        begun_s, free_s = free_s, free_s + costs[index].communication_s
        spans.append((index, (begun_s, free_s)))
    return spans
