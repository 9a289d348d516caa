"""A parameter server: its state and its loop; run as a module, the process beside a worker.

The process takes its settings as one JSON line on stdin (a token on the command line could be read
by all users of the machine), prints its endpoints as one line and ends when its stdin does, which
also happens when the worker is killed.
"""

from __future__ import annotations

import gc
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import torch
import zmq
from msgspec.structs import replace

from testbed.backends.zmq_ps.frames import bytes_of, receive_frames, send_frames, tensor_of
from testbed.backends.zmq_ps.server_exchange import Relays, Sums
from testbed.backends.zmq_ps.server_merge import Merges
from testbed.backends.zmq_ps.server_update import Parameters
from testbed.backends.zmq_ps.wire import (
    FIXED_BYTES,
    MAX_KEY_BYTES,
    MAX_NOTE_BYTES,
    ExchangeName,
    Flag,
    Header,
    Mismatch,
    Operation,
    Packet,
    Refused,
    WireError,
    answer,
    check_payload,
    check_payload_sense,
    decode,
    encode,
    token_digest,
    worker_identity,
)
from testbed.base.errors import tell
from testbed.base.recorder import Recorder
from testbed.base.types import Traffic

# The state of a parameter server: packets in, answers out; no sockets, so that tests can drive it.
#
# One exchange is a table entry per slice, opened by the first message of any worker and closed by
# the answer to the last, so that workers may arrive in any order and a server is not told before
# which tensors there are.


class ServerState:
    """Packet in, messages out, for all workers of a job.

    Args:
        num_workers: workers 0 .. num_workers - 1.
        staleness: clocks that the slowest worker may be behind; 0 = bulk synchronous, None = async.
    """

    def __init__(self, num_workers: int, staleness: int | None = 0) -> None:
        self.num_workers = num_workers
        self.departed: set[int] = set()
        self._sums = Sums(num_workers)
        self._relays = Relays(num_workers)
        self._merges = Merges(num_workers)
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
        """Whether every worker has sent GOODBYE."""
        return len(self.departed) == self.num_workers

    @property
    def num_open(self) -> int:
        """Slices of exchanges that wait for a worker; 0 when all are answered."""
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
            # Kept for good: workers that come later must get it too, and the job ends here.
            self._broken[header.exchange] = note
            return [_error(header, worker, note) for worker in range(self.num_workers)]

    def _depart(self, message: Packet) -> list[Packet]:
        self.departed.add(message.header.worker)
        released = self._parameters.depart(message.header.worker)
        return [*released, answer(message.header, message.header.worker)]


def _error(header: Header, worker: int, note: bytes) -> Packet:
    return Packet(replace(header, worker=worker, flags=Flag.ERROR, note=note[:2000]))


UNRECORDED = frozenset({Operation.COUNTERS, Operation.GOODBYE, Operation.RECORDED})
LOG_INTERVAL_S = 1.0
FLUSH_MS = 2000


class ServerSettings(msgspec.Struct, frozen=True):
    """What a server is given before it binds.

    Attributes:
        index: number of this server, for messages.
        address: the interface to bind to.
        token: the job's secret.
        num_workers: workers of the job.
        staleness: as in `ServerState`.
        slice_bytes: largest payload that a worker may send.
        beside: there is a worker on this machine that need not go through the network.
        records: keep what the server does, for a worker that asks for it.
    """

    index: int
    address: str
    token: bytes
    num_workers: int
    staleness: int | None
    slice_bytes: int
    beside: bool = False
    records: bool = False


class Counters(msgspec.Struct, frozen=True):
    """What a server moved for each worker, and what it refused and why.

    Attributes:
        received_bytes: payload from each worker.
        sent_bytes: payload to each worker.
        header_bytes: headers to and from each worker.
        num_messages: messages to and from each worker.
        refused: kind of refusal -> how often.
    """

    received_bytes: list[int]
    sent_bytes: list[int]
    header_bytes: list[int]
    num_messages: list[int]
    refused: dict[str, int]

    def traffic(self, owner: int) -> Traffic:
        """What left and reached the host of the worker beside which this server runs."""
        others = [w for w in range(len(self.sent_bytes)) if w != owner]
        return Traffic(
            sent_bytes=sum(self.sent_bytes[w] for w in others),
            received_bytes=sum(self.received_bytes[w] for w in others),
            header_bytes=sum(self.header_bytes[w] for w in others),
            num_messages=sum(self.num_messages[w] for w in others),
        )


class Refusals:
    """Counts what was refused and logs it on stderr, at most once a second for each kind."""

    def __init__(self, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._who = who
        self._clock = clock
        self._said_s: dict[str, float] = {}

    def add(self, kind: str, why: str) -> None:
        """One more of a kind."""
        self.counts[kind] += 1
        now_s = self._clock()
        if now_s - self._said_s.get(kind, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._said_s[kind] = now_s
            count = self.counts[kind]
            tell(f"{self._who}: refused {kind} ({count} so far): {why[:300]}\n")


class Server:
    """A bound parameter server.

    Args:
        settings: see `ServerSettings`.
        context: the ZeroMQ context; closed by the caller.
        recorder: takes what the server does; None: it keeps that itself, if it is to record.

    Raises:
        zmq.ZMQError: the address is not one of this machine.
    """

    def __init__(
        self,
        settings: ServerSettings,
        context: zmq.Context[zmq.Socket[bytes]],
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder or (Recorder(on=True) if settings.records else None)
        self._state = ServerState(settings.num_workers, settings.staleness)
        self._digest = token_digest(settings.token)
        self._identities = [worker_identity(settings.token, w) for w in range(settings.num_workers)]
        self._workers = {identity: w for w, identity in enumerate(self._identities)}
        self.refusals = Refusals(f"parameter server {settings.index}")
        self._received, self._sent, self._headers, self._messages = (
            [0] * settings.num_workers for _ in range(4)
        )
        self._socket = context.socket(zmq.ROUTER)
        # No limits, so nothing is ever dropped: what can be on its way is bounded by one request
        # per worker and channel.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        headers = FIXED_BYTES + MAX_KEY_BYTES + MAX_NOTE_BYTES
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(settings.slice_bytes, headers))
        self._socket.setsockopt(zmq.IPV6, ":" in settings.address)
        host = f"[{settings.address}]" if ":" in settings.address else settings.address
        self._socket.bind(f"tcp://{host}:0")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.local_endpoint = self.endpoint
        if settings.beside and sys.platform == "linux":
            # An abstract Unix socket: a 64 MB sum took 10 to 40 % less time than over loopback
            # TCP, and there is no file to remove.
            self.local_endpoint = f"ipc://@testbed-ps-{secrets.token_hex(16)}"
            self._socket.bind(self.local_endpoint)

    def run(self, stop_fd: int) -> bool:
        """Serve until all workers have left (True) or `stop_fd` becomes readable (False)."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(stop_fd, zmq.POLLIN)
        while not self._state.finished:
            ready = dict(poller.poll())
            if stop_fd in ready:
                return False
            self._receive()
        self._socket.setsockopt(zmq.LINGER, FLUSH_MS)  # for the answers to the last GOODBYEs
        return True

    def close(self) -> None:
        """Unbind."""
        self._socket.close()

    def _receive(self) -> None:
        begun_s = time.perf_counter()
        try:
            headers, payloads = receive_frames(self._socket, 2)
        except zmq.Again:
            return
        try:
            message = self._understand(headers, payloads)
            read_s = time.perf_counter()
            replies = self._handle(message)
            handled_s = time.perf_counter()
        except (WireError, Refused) as error:
            self.refusals.add(type(error).__name__, str(error))
            return
        worker = message.header.worker
        self._received[worker] += message.header.payload_bytes
        self._headers[worker] += len(headers[1])
        self._messages[worker] += 1
        shared: torch.Tensor | None = None
        elements: memoryview | None = None
        for reply in replies:
            if reply.payload is not shared:  # answers to all workers are of the same elements
                shared = reply.payload
                elements = None if shared is None else bytes_of(shared).data
            self._send(reply.header, elements)
        self._note("receive", message.header, begun_s, read_s)
        self._note("reduce", message.header, read_s, handled_s)

    def _note(self, kind: str, header: Header, begin_s: float, end_s: float) -> None:
        if self._recorder is not None and header.operation not in UNRECORDED:
            self._recorder.add(
                *(kind, header.key, begin_s, end_s, header.step),
                num_bytes=header.payload_bytes,
                peer=header.worker,
            )

    def _understand(self, headers: list[bytes], payloads: list[memoryview]) -> Packet:
        worker = self._workers.get(headers[0])
        if worker is None:
            raise Refused("the sender is no worker of this job")
        num_frames = len(headers) - 1 + len(payloads)
        if num_frames not in (1, 2):
            raise Refused(f"rank {worker} sent {num_frames} frames; expected 1 or 2")
        header = decode(headers[1], self._digest)
        if header.worker != worker:
            raise Refused(f"rank {worker} speaks for rank {header.worker}")
        carries = bool(header.flags & Flag.PAYLOAD)
        if carries != bool(payloads):
            raise Refused(f"rank {worker} sent {num_frames} frames; expected {1 + carries}")
        if not carries:
            return Packet(header)
        (payload,) = payloads
        check_payload(header, payload.nbytes)
        return Packet(header, tensor_of(payload, header.dtype))

    def _handle(self, message: Packet) -> list[Packet]:
        header = message.header
        if header.operation is Operation.RECORDED:
            return [Packet(*self._recorded(header.worker))]
        if header.operation is Operation.COUNTERS:
            note = msgspec.json.encode(self.counters())
            return [Packet(Header(Operation.COUNTERS, header.worker, note=note))]
        return self._state.handle(message)

    def _recorded(self, worker: int) -> tuple[Header, torch.Tensor]:
        """What this server did, as bytes in a payload."""
        words = (self._recorder or Recorder()).written()
        header = Header(
            *(Operation.RECORDED, worker),
            flags=Flag.PAYLOAD,
            num_elements=len(words),
            total_elements=len(words),
        )
        return header, torch.frombuffer(bytearray(words), dtype=torch.uint8)

    def counters(self) -> Counters:
        """Bytes and messages of each worker so far."""
        return Counters(
            list(self._received),
            list(self._sent),
            list(self._headers),
            list(self._messages),
            dict(self.refusals.counts),
        )

    def _send(self, header: Header, elements: memoryview | None) -> None:
        frame, begun_s = encode(header, self._digest), time.perf_counter()
        try:
            send_frames(self._socket, (self._identities[header.worker], frame), elements)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # The worker has ended, or has not connected yet and gets it with its first request.
            self.refusals.add("Undeliverable", f"{header.operation.name} to rank {header.worker}")
            return
        self._sent[header.worker] += header.payload_bytes
        self._headers[header.worker] += len(frame)
        self._messages[header.worker] += 1
        self._note("send", header, begun_s, time.perf_counter())


def main() -> int:
    """The process beside a worker: settings on stdin, endpoints (for others, for it) on stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's; we end with its pipe
    torch.set_num_threads(1)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerSettings)
    with zmq.Context() as context:
        server = Server(settings, context)
        gc.freeze()  # a garbage collection over all that was imported would delay all workers
        print(server.endpoint, server.local_endpoint, flush=True)
        server.run(sys.stdin.fileno())
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
