"""What a parameter server knows and answers; no sockets, so that tests drive it message by message.

One exchange is a table entry per slice, opened by the first message of any worker and closed by
the answer to the last, so that workers may arrive in any order and a server never needs to know
which tensors there are.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from testbed.backends.zmq_ps.server_merge import Merges
from testbed.backends.zmq_ps.server_relay import Relays
from testbed.backends.zmq_ps.server_sum import Sums
from testbed.backends.zmq_ps.server_update import Parameters
from testbed.backends.zmq_ps.wire import (
    ExchangeName,
    Flag,
    Header,
    Mismatch,
    Operation,
    Packet,
    Refused,
    answer,
    check_payload_sense,
)


class ServerState:
    """Packet in, messages out, for all workers of a job.

    Args:
        num_workers: workers 0 .. num_workers - 1.
        staleness: clocks that the slowest worker may be behind; 0 = bulk synchronous, None = async.
        repack: see `Merges`.
    """

    def __init__(
        self, num_workers: int, staleness: int | None = 0, *, repack: bool = False
    ) -> None:
        self.num_workers = num_workers
        self.departed: set[int] = set()
        self._sums = Sums(num_workers)
        self._relays = Relays(num_workers)
        self._merges = Merges(num_workers, repack)
        self._parameters = Parameters(num_workers, staleness)
        self._broken: dict[ExchangeName, bytes] = {}
        self._handlers: dict[Operation, Callable[[Packet], list[Packet]]] = {
            Operation.ALL_REDUCE: self._sums.push,
            Operation.FOLD: self._sums.push,
            Operation.SPREAD: self._sums.pull,
            Operation.BARRIER: self._sums.push,
            Operation.ALL_GATHER: self._relays.all_gather,
            Operation.ALL_TO_ALL: self._relays.all_to_all,
            Operation.MERGE: self._merges.push,
            Operation.BROADCAST: self._relays.broadcast,
            Operation.INSTALL: self._parameters.install,
            Operation.APPLY: self._parameters.apply,
            Operation.GOODBYE: self._depart,
        }

    @property
    def finished(self) -> bool:
        """Whether every worker has said goodbye."""
        return len(self.departed) == self.num_workers

    @property
    def num_open(self) -> int:
        """Slices of exchanges that wait for somebody; 0 when all is answered."""
        parts = (self._sums, self._relays, self._merges, self._parameters)
        return sum(part.num_open for part in parts)

    def handle(self, message: Packet) -> list[Packet]:
        """Take one message in and give the messages that can now go out.

        Raises:
            Refused: the message does not belong here; the state is as before.
        """
        header = message.header
        if header.worker >= self.num_workers:
            raise Refused(f"worker is {header.worker}; expected 0 to {self.num_workers - 1}")
        if header.worker in self.departed:
            raise Refused(f"worker {header.worker} has already left")
        handler = self._handlers.get(header.operation)
        if handler is None:
            raise Refused(f"{header.operation.name} is no exchange")
        check_payload_sense(header)
        broken = self._broken.get(header.exchange)
        if broken is not None:
            return [_error(header, header.worker, broken)]
        try:
            return handler(message)
        except Mismatch as error:
            note = str(error).encode()
            # Kept for good: workers that come later must learn of it too, and the job ends here.
            self._broken[header.exchange] = note
            return [_error(header, worker, note) for worker in range(self.num_workers)]

    def _depart(self, message: Packet) -> list[Packet]:
        self.departed.add(message.header.worker)
        released = self._parameters.depart(message.header.worker)
        return [*released, answer(message.header, message.header.worker)]


def _error(header: Header, worker: int, note: bytes) -> Packet:
    return Packet(replace(header, worker=worker, flags=Flag.ERROR, note=note[:2000]))
