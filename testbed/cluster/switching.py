"""When a frame arrives over links with a rate and a latency: virtual clocks, pure."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAC: Final = bytes((2, 0, 0, 0, 0))  # of a node's card, before the node's number
LARGEST_ACK_BYTES: Final = 134
_ETHERNET, _IPV4, _TCP, _ACK, _SETS_UP_OR_ENDS = 14, b"\x08\x00", 6, 0x10, 0x07


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """A frame that is to be handed over.

    Attributes:
        at_s: when.
        number: in the order in which frames were sent.
        target: index of the node.
        data: the frame with whatever stands before it.
    """

    at_s: float
    number: int
    target: int
    data: bytes


class Switch:
    """The links of all nodes to one switch, and what is on its way over them.

    A frame of n bytes that node i sends to node j at time t, with rates R, latency l and draws d
    from a jitter J, uniform in -J .. J:

        start  s = max(t, U_i),            U_i = s + 8 n / R_up,i
        first bit at the switch            f = max(s + l + d, that of i's frame before it)
        last bit at j, which is when it is handed over
               e = max(max(f, D_j) + 8 n / R_down,j, f + 8 n / R_up,i),   D_j = e

    U and D are when a direction is free again; f is known before D_j is, so that frames take D_j in
    the order of their f. Nothing is saved up in a pause. An acknowledgement without payload takes
    its share of both directions and waits for none: senders have a window of data in the queue, and
    a link whose acknowledgements waited behind it would stand idle for as long.

    Args:
        up_bps: R_up of each node, real bits per second.
        down_bps: R_down.
        latency_s: l.
        jitter_s: J.
        seed: of the draws.

    Example:
        >>> switch = Switch([8e6, 8e6], [8e6, 8e6], latency_s=1.0)
        >>> for data in (b"first", b"second"):
        ...     switch.send(0, 1, 1000, data, now_s=0.0)
        >>> [(round(a.at_s, 6), a.data) for a in switch.due(2.0)]
        [(1.001, b'first'), (1.002, b'second')]
    """

    def __init__(
        self,
        up_bps: Sequence[float],
        down_bps: Sequence[float],
        latency_s: float,
        jitter_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._up_s_per_byte = [8 / bps for bps in up_bps]
        self._down_s_per_byte = [8 / bps for bps in down_bps]
        self._latency_s, self._jitter_s = latency_s, jitter_s
        self._drawn = random.Random(seed)
        self._up_free_s = [0.0] * len(up_bps)
        self._down_free_s = [0.0] * len(down_bps)
        self._first_bit_s = [0.0] * len(up_bps)
        # (first bit at the switch, number, source, target, bytes on the wire, waits, data)
        self._travelling: list[tuple[float, int, int, int, int, bool, bytes]] = []
        self._arriving: list[tuple[float, int, int, bytes]] = []
        self._number = 0

    def send(
        self,
        source: int,
        target: int,
        num_bytes: int,
        data: bytes,
        now_s: float,
        *,
        waits: bool = True,
    ) -> None:
        """Take a frame of so many bytes on the wire; `waits=False` passes the queues by."""
        start_s = max(now_s, self._up_free_s[source])
        self._up_free_s[source] = start_s + num_bytes * self._up_s_per_byte[source]
        delay_s = self._latency_s
        if self._jitter_s:
            delay_s += self._drawn.uniform(-self._jitter_s, self._jitter_s)
        first_s = (start_s if waits else now_s) + delay_s
        if waits:
            first_s = self._first_bit_s[source] = max(first_s, self._first_bit_s[source])
        self._number += 1
        frame = (first_s, self._number, source, target, num_bytes, waits, data)
        heapq.heappush(self._travelling, frame)

    def due(self, now_s: float) -> list[Arrival]:
        """What has arrived by now, in the order of arrival; each frame once."""
        while self._travelling and self._travelling[0][0] <= now_s:
            first_s, number, source, target, size, waits, data = heapq.heappop(self._travelling)
            free_s = max(first_s, self._down_free_s[target])
            at_s = free_s + size * self._down_s_per_byte[target]
            at_s = max(at_s, first_s + size * self._up_s_per_byte[source])
            self._down_free_s[target] = at_s
            heapq.heappush(self._arriving, (at_s if waits else first_s, number, target, data))
        arrived = []
        while self._arriving and self._arriving[0][0] <= now_s:
            arrived.append(Arrival(*heapq.heappop(self._arriving)))
        return arrived

    def next_s(self) -> float | None:
        """When `due` is to be asked next; None: nothing is on its way."""
        heads = [heap[0][0] for heap in (self._travelling, self._arriving) if heap]
        return min(heads, default=None)


def is_pure_ack(frame: bytes) -> bool:
    """Whether an Ethernet frame is a TCP acknowledgement without payload, SYN, FIN or RST."""
    if len(frame) > LARGEST_ACK_BYTES or frame[12:14] != _IPV4 or frame[23] != _TCP:
        return False
    tcp = _ETHERNET + 4 * (frame[_ETHERNET] & 15)
    if len(frame) < tcp + 20:
        return False
    headers = tcp - _ETHERNET + 4 * (frame[tcp + 12] >> 4)
    flags = frame[tcp + 13]
    is_empty = int.from_bytes(frame[16:18], "big") == headers
    return is_empty and bool(flags & _ACK) and not flags & _SETS_UP_OR_ENDS


def wire_bytes(frame: bytes, segment_bytes: int) -> int:
    r"""Bytes of a frame once TCP has cut it up, the headers of every piece counted.

    Args:
        frame: from the Ethernet header on.
        segment_bytes: payload of each piece; 0: it is sent as it is.

    Example:
        >>> frame = bytes(14) + b"\x45" + bytes(31) + b"\x80" + bytes(7 + 12) + bytes(2896)
        >>> wire_bytes(frame, 1448) == 2 * 1514, wire_bytes(frame, 0) == len(frame)
        (True, True)
    """
    if not segment_bytes:
        return len(frame)
    tcp = _ETHERNET + 4 * (frame[_ETHERNET] & 15)
    headers = tcp + 4 * (frame[tcp + 12] >> 4)
    pieces = -(-(len(frame) - headers) // segment_bytes)
    return len(frame) + (pieces - 1) * headers
