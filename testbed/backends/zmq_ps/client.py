"""The worker's communication thread: one socket per server, one poll for everything."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from collections.abc import Callable

import msgspec
import zmq

from testbed.backends.protocol import Group
from testbed.backends.queue import PendingWork, RequestQueue
from testbed.backends.zmq_ps.frames import Bytes, has_message, receive_frames, send_frames
from testbed.backends.zmq_ps.host import ServerProcess
from testbed.backends.zmq_ps.placement import Owners
from testbed.backends.zmq_ps.server_process import Counters
from testbed.backends.zmq_ps.wire import (
    ExchangeName,
    Flag,
    Header,
    Operation,
    check_payload,
    decode,
    encode,
    token_digest,
    worker_identity,
)
from testbed.backends.zmq_ps.worker_exchange import (
    AllGatherExchange,
    AllToAllExchange,
    Exchange,
    Layout,
    MergeExchange,
    Ticket,
)
from testbed.base.errors import Disagreement, RankLost, TestbedError
from testbed.base.recorder import Recorder
from testbed.base.types import Op, Request, Traffic
from testbed.compression.server_merge import build

# Which exchange carries out which op.


def begin(request: Request, ticket: Ticket, layout: Layout, owners: Owners) -> Exchange:
    """The exchange that carries a request out, which is about to start on its channel."""
    match request.op:
        case Op.ALL_GATHER:
            return AllGatherExchange(request, ticket, layout)
        case Op.ALL_TO_ALL:
            return AllToAllExchange(request, ticket, layout)
        case Op.MERGE if request.parts:
            # Selected elements may be most frequent in one range of every message, so that keys
            # differ in which server has the first one.
            first = zlib.crc32(request.key.encode())
            return MergeExchange(request, ticket, layout, first)
        case Op.MERGE:
            merging = build(request.note)
            if merging.again is not None:
                # Its server keeps what it did not send: the same one on whichever channel.
                owner = zlib.crc32(request.key.encode())
            else:
                owner = owners.owner(request.channel, request.key, merging.dense_bytes)
            return MergeExchange(request, ticket, layout, owner)
        case _:
            return Exchange(request, ticket, layout)


# Waking a thread that waits in a poll, from any other thread.


class Waker:
    """A socket pair: `wake` makes `fd` readable until `drain`; harmless once closed."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._closed = False
        self.fd = self._reader.fileno()

    def wake(self) -> None:
        """Make the waiting thread run."""
        with self._lock:
            if not self._closed:
                # A full buffer means that the thread has been woken and did not run yet.
                with contextlib.suppress(BlockingIOError):
                    self._writer.send(b"!")

    def drain(self) -> None:
        """Forget all wakes so far."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock:
            self._closed = True
            self._reader.close()
            self._writer.close()


class Client:
    """Runs the requests of a queue against the servers, in a thread of its own.

    Args:
        group: the job as this rank sees it.
        layout: this worker's rank and how tensors are cut.
        endpoints: where the servers listen, in order.
        queue: where requests come from.
        ticket_of: numbers a request that is about to start, given its channel's own number.
        waker: woken by the queue; owned by the caller.
        own: the server process beside this worker, if there is one.
    """

    def __init__(
        self,
        group: Group,
        layout: Layout,
        endpoints: list[str],
        queue: RequestQueue,
        ticket_of: Callable[[PendingWork, int], Ticket],
        waker: Waker,
        own: ServerProcess | None,
    ) -> None:
        self._layout = layout
        self._endpoints = endpoints
        self._token = group.token
        self._digest = token_digest(group.token)
        self._queue = queue
        self._ticket_of = ticket_of
        self._waker = waker
        self._own = own
        self._recorder = group.recorder
        self._report = group.control.report_failure
        self._owners = Owners(layout.num_servers)
        self._idle = set(range(group.num_channels))
        self._sequences = [0] * group.num_channels
        self._under_way: dict[ExchangeName, tuple[PendingWork, Exchange]] = {}
        self._traffic = Traffic()
        self._counters: Counters | None = None
        self._counters_wanted: Operation | None = None
        self._counters_asked = False
        self._counters_come = threading.Event()
        self._counters_lock = threading.Lock()
        self._leave = threading.Event()
        self._abort = threading.Event()
        self._goodbyes: set[int] | None = None  # servers that have yet to confirm GOODBYE
        self._sockets: list[zmq.Socket[bytes]] = []
        self._thread = threading.Thread(target=self._run, name=f"zmq-ps-{layout.rank}", daemon=True)

    def start(self) -> None:
        """Begin to take requests."""
        self._thread.start()

    @property
    def traffic(self) -> Traffic:
        """What this worker itself moved so far."""
        return self._traffic

    @property
    def last_counters(self) -> Counters | None:
        """What the own server had moved when it was last asked."""
        return self._counters

    def ask_counters(self, timeout_s: float, operation: Operation = Operation.COUNTERS) -> None:
        """Ask the own server what it moved, or did; it may be unable to answer in time."""
        if self._own is None or self._leave.is_set():
            return
        with self._counters_lock:
            self._counters_come.clear()
            self._counters_wanted = operation
            self._waker.wake()
            if self._thread.is_alive():  # else there is no thread to answer
                self._counters_come.wait(timeout_s)

    def ask_recorded(self, timeout_s: float) -> None:
        """Ask the own server what it did, and give that to the recorder."""
        self.ask_counters(timeout_s, Operation.RECORDED)

    def stop(self, timeout_s: float, *, in_order: bool) -> None:
        """End the thread and its sockets.

        Args:
            timeout_s: how long the servers may take to confirm it.
            in_order: send GOODBYE first; False once nothing can finish any more.
        """
        if in_order:
            self._leave.set()
            self._waker.wake()
            self._thread.join(timeout_s)
        self._abort.set()
        self._waker.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            with zmq.Context() as context:
                try:
                    self._connect(context)
                    self._loop()
                finally:
                    for socket in self._sockets:
                        socket.close(linger=0)
        except Exception as error:
            # All that waits, here and on other ranks, fails with the error that ended the thread.
            self._queue.fail_all(error)
            if not isinstance(error, Disagreement):  # the server sends it to the others
                named = isinstance(error, TestbedError)
                self._report(str(error) if named else f"{type(error).__name__}: {error}")
        finally:
            self._counters_come.set()

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        for endpoint in self._endpoints:
            socket = context.socket(zmq.DEALER)
            self._sockets.append(socket)
            socket.setsockopt(zmq.IDENTITY, worker_identity(self._token, self._layout.rank))
            # No limits, so a send never blocks; one request per channel bounds what is on its way.
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, "[" in endpoint)
            socket.connect(endpoint)

    def _loop(self) -> None:
        poller = zmq.Poller()
        for dealer in self._sockets:
            poller.register(dealer, zmq.POLLIN)
        poller.register(self._waker.fd, zmq.POLLIN)
        watched = -1 if self._own is None else self._own.watch_fd
        if self._own is not None:
            poller.register(watched, zmq.POLLIN)
        while not (self._queue.lost or self._abort.is_set() or self._goodbyes == set()):
            self._begin_requests()
            self._ask_and_leave()
            ready = dict(poller.poll())
            if self._waker.fd in ready:
                self._waker.drain()
            for server, dealer in enumerate(self._sockets):
                if dealer in ready:
                    self._receive(server, dealer)
            if watched in ready:
                self._own_server_ended()
                poller.unregister(watched)

    def _begin_requests(self) -> None:
        for channel in sorted(self._idle):
            work = self._queue.take(channel)
            if work is None:
                continue
            self._idle.discard(channel)
            work.start()
            ticket = self._ticket_of(work, self._sequences[channel])
            self._sequences[channel] += 1
            exchange = begin(work.request, ticket, self._layout, self._owners)
            self._under_way[exchange.header.exchange] = (work, exchange)
            for server, header, elements in exchange.messages():
                exchange.traffic += self._send(server, header, elements)
            if exchange.about_to_end:
                self._queue.let_next(work)

    def _ask_and_leave(self) -> None:
        wanted = self._counters_wanted
        if wanted is not None and not self._counters_asked:
            self._counters_wanted, self._counters_asked = None, True
            self._send(self._own_index, Header(wanted, self._layout.rank), None)
        if self._leave.is_set() and self._goodbyes is None:
            self._goodbyes = set(range(len(self._sockets)))
            for server in range(len(self._sockets)):
                self._send(server, Header(Operation.GOODBYE, self._layout.rank), None)

    @property
    def _own_index(self) -> int:
        return -1 if self._own is None else self._own.index

    def _send(self, server: int, header: Header, elements: Bytes | None) -> Traffic:
        frame = encode(header, self._digest)
        send_frames(self._sockets[server], (frame,), None if elements is None else elements.data)
        return self._count(server, len(frame), sent=header.payload_bytes)

    def _count(self, server: int, header_bytes: int, sent: int = 0, received: int = 0) -> Traffic:
        if server == self._own_index:
            traffic = Traffic(local_bytes=sent + received)
        else:
            traffic = Traffic(sent, received, header_bytes, num_messages=1)
        self._traffic += traffic
        return traffic

    def _receive(self, server: int, socket: zmq.Socket[bytes]) -> None:
        while has_message(socket):
            (frame,), payloads = receive_frames(socket, 1)
            header = decode(frame, self._digest)
            payload = payloads[0] if payloads else memoryview(b"")
            check_payload(header, payload.nbytes)
            traffic = self._count(server, len(frame), received=header.payload_bytes)
            self._take(server, header, payload, traffic)

    def _take(self, server: int, header: Header, payload: memoryview, traffic: Traffic) -> None:
        if header.operation in (Operation.COUNTERS, Operation.RECORDED):
            if header.operation is Operation.COUNTERS:
                self._counters = msgspec.json.decode(header.note, type=Counters)
            elif self._recorder is not None:
                self._recorder.beside[server] = Recorder.read(payload)
            self._counters_asked = False
            self._counters_come.set()
            return
        if header.operation is Operation.GOODBYE:
            assert self._goodbyes is not None
            self._goodbyes.discard(server)
            return
        if header.flags & Flag.ERROR:
            # An error about an exchange that this rank has not begun comes again when it does.
            if header.exchange in self._under_way:
                raise Disagreement(header.note.decode(errors="replace"))
            return
        work, exchange = self._under_way[header.exchange]
        if not exchange.first_answer_s:
            exchange.first_answer_s = time.perf_counter()
        exchange.traffic += traffic
        over = exchange.take(header, payload)
        if exchange.about_to_end:
            self._queue.let_next(work)
        if over:
            del self._under_way[header.exchange]
            self._idle.add(work.request.channel)
            self._queue.finish(work, exchange.result())
            if self._recorder is not None:
                self._recorder.add_received(work.event, exchange.first_answer_s)

    def _own_server_ended(self) -> None:
        assert self._own is not None
        status = self._own.status(1.0)
        if self._goodbyes is not None and status == 0:
            self._goodbyes.discard(self._own.index)  # all workers had left, and it ended
            return
        how = "" if (status or 0) < 0 else "; see its message on stderr"  # by a signal it has none
        raise RankLost(str(self._own), f"it ended with status {status}{how}")
