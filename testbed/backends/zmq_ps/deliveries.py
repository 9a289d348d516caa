"""A server's half of DELIVER: passes parts on to the worker that they are for."""

from __future__ import annotations

from dataclasses import dataclass, field

from testbed.backends.zmq_ps.relays import passed_on
from testbed.backends.zmq_ps.state import Message, Mismatch, answer, check_same
from testbed.backends.zmq_ps.wire import Flag, Header, Operation

ExchangeName = tuple[Operation, int, int]


@dataclass
class _Delivery:
    """One exchange on one server: what came, and what waits for its destination to ask."""

    first: Header
    left: dict[int, int] = field(default_factory=dict)  # worker -> messages still to come
    asked: set[int] = field(default_factory=set)
    held: dict[int, list[Message]] = field(default_factory=dict)


class Deliveries:
    """DELIVER of one server."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._open: dict[ExchangeName, _Delivery] = {}

    @property
    def num_open(self) -> int:
        """Exchanges that wait for a worker."""
        return len(self._open)

    def handle(self, message: Message) -> list[Message]:
        """A slice of a part, or a worker's question for its parts.

        A worker is sent nothing before it asked, so it never has to keep what belongs to an
        exchange that it has not begun. What carries nothing is not confirmed.

        Raises:
            Mismatch: keys, steps or dtypes differ, a worker sends more than it announced, or for a
                rank that does not exist.
        """
        header = message.header
        worker, destination = header.worker, header.root
        entry = self._open.setdefault(header.exchange, _Delivery(header))
        check_same(entry.first, header, ("key", "step", "dtype"))
        left = entry.left.get(worker, header.frame_count) - 1
        if left < 0 or destination >= self._num_workers:
            raise Mismatch(
                f"rank {worker} sent a part of {header.key!r} to rank {destination} that it had "
                f"not announced; there are {self._num_workers} ranks"
            )
        entry.left[worker] = left
        replies: list[Message] = []
        if not header.flags & Flag.PAYLOAD:
            entry.asked.add(worker)
            held = entry.held.pop(worker, [])
            replies = [answer(header, worker), *(passed_on(part, worker) for part in held)]
        else:
            if header.num_elements:
                replies.append(answer(header, worker))
            if destination in entry.asked:
                replies.append(passed_on(message, destination))
            else:
                entry.held.setdefault(destination, []).append(message)
        if len(entry.left) == self._num_workers and not any(entry.left.values()):
            del self._open[header.exchange]
        return replies
