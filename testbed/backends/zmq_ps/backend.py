"""The parameter server as a backend: what opens it, and what the trainer holds."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, cast

import zmq

from testbed.backends.checks import check_request
from testbed.backends.protocol import Group
from testbed.backends.queue import PendingWork, RequestQueue
from testbed.backends.zmq_ps.client import Client, Waker
from testbed.backends.zmq_ps.host import ServerProcess
from testbed.backends.zmq_ps.options import ZmqPsOptions
from testbed.backends.zmq_ps.server_process import Server, ServerSettings
from testbed.backends.zmq_ps.server_update import parse_optimizer
from testbed.backends.zmq_ps.wire import MAX_KEY_BYTES, MAX_NOTE_BYTES
from testbed.backends.zmq_ps.worker_exchange import Layout, Tickets
from testbed.base.errors import RankLost, UsageError
from testbed.base.types import Capabilities, Op, Request, Traffic
from testbed.compression.server_merge import build

if TYPE_CHECKING:
    from testbed.control.protocol import Loss

START_UP_S = 90.0
"""Starting a process and importing torch is no exchange; the group's deadline may be shorter."""

BASE_OPS = frozenset(Op) - {Op.INSTALL, Op.APPLY}


class ZmqPsBackend:
    """One worker's end of the parameter servers; see `testbed.backends.protocol.Backend`.

    Args:
        group: the job as this rank sees it.
        options: as parsed.
        endpoints: where the servers listen.
        own: the server process beside this worker, which this backend ends.
    """

    def __init__(
        self,
        group: Group,
        options: ZmqPsOptions,
        endpoints: list[str],
        own: ServerProcess | None,
    ) -> None:
        self.rank = group.rank
        self.size = group.size
        self.capabilities = Capabilities(
            ops=frozenset(Op) if options.update_on_server else BASE_OPS,
            num_channels=group.num_channels,
            consistency=options.consistency,
            num_helper_processes=0 if own is None else 1,
            exact_order=options.staleness == 0,
            num_mergers=options.num_servers(group.size),
            repacks=options.repack,
        )
        self._group = group
        self._own = own
        self._closing = threading.Lock()
        self._closed = False
        self._tickets = Tickets()
        self._waker = Waker()
        self._queue = RequestQueue(group, self._waker.wake)
        layout = Layout(group.rank, group.size, len(endpoints), options.slice_bytes)
        self._client = Client(
            group,
            layout,
            endpoints,
            self._queue,
            self._tickets.at_start,
            self._waker,
            own,
        )
        self._client.start()

    def submit(self, request: Request) -> PendingWork:
        """See `Backend.submit`."""
        check_request("zmq-ps", request, self.capabilities, self.size)
        check_words(request, self.capabilities.num_mergers)
        return self._tickets.submit(request, self._queue.submit)

    def traffic(self) -> Traffic:
        """See `Backend.traffic`; asks the own server, and waits at most the group's deadline."""
        if not self._queue.lost:
            self._client.ask_counters(self._group.deadline_s)
        total = self._client.traffic
        counters = self._client.last_counters
        return total if counters is None else total + counters.traffic(self.rank)

    def close(self, timeout_s: float = 10.0) -> None:
        """Leave the servers (GOODBYE) and end thread, sockets and the own server process.

        The own server serves the other workers until they have left too, for `timeout_s` seconds
        at most; workers that still need it then get an error that says so.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        end_s = time.monotonic() + timeout_s
        self._queue.close()
        in_order = not self._queue.lost and not self._queue.busy
        if self._queue.busy:
            self._queue.fail_all(UsageError("the backend was closed before this request was done"))
        if in_order and self._own is not None:
            self._client.ask_counters(timeout_s / 4)
            if self._group.recorder is not None:
                self._client.ask_recorded(timeout_s / 4)
        self._client.stop(end_s - time.monotonic(), in_order=in_order)
        self._waker.close()
        if self._own is not None:
            in_order = in_order and not self._queue.lost
            alone = self._own.end(end_s - time.monotonic() if in_order else 0.0)
            if in_order and not alone:
                self._group.control.report_failure(
                    f"rank {self.rank} closed and its {self._own} ended although other workers "
                    f"had not left {timeout_s:g} s later; meet at a barrier before close"
                )


def check_group(group: Group, options: ZmqPsOptions) -> int:
    """The number of servers, if options and group fit.

    Raises:
        UsageError: they do not; says which and what to change.
    """
    num_servers = options.num_servers(group.size)
    if group.num_servers != options.num_dedicated:
        raise UsageError(
            f"zmq-ps: servers={options.servers} needs {options.num_dedicated} dedicated server "
            f"processes and the job has {group.num_servers}; start the job with as many"
        )
    if group.order == "priority" and options.staleness != 0:
        raise UsageError(
            f"zmq-ps: order=priority cannot be combined with consistency={options.consistency}: "
            "rank 0 would decide the order of workers that run ahead of it; use order=fifo"
        )
    if not group.device.startswith("cpu"):
        raise UsageError(
            f"zmq-ps: device is {group.device!r}; servers exchange tensors in CPU memory; "
            "use device=cpu, or copy to the CPU before submitting"
        )
    return num_servers


def check_words(request: Request, num_servers: int) -> None:
    """Whether key and note are what a server understands; the rest has been checked.

    Raises:
        UsageError: the key, optimizer or mergers; says what was given and expected.
    """
    if len(request.key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise UsageError(f"key has more than {MAX_KEY_BYTES} bytes; give the tensor a shorter one")
    if request.op is Op.INSTALL:
        parse_optimizer(request.note)
    if request.op is Op.MERGE:
        _check_mergers(request, num_servers)


def _check_mergers(request: Request, num_servers: int) -> None:
    notes = request.note.split("\n") if request.parts else [request.note]
    if request.parts and not len(request.parts) == len(notes) == num_servers:
        raise UsageError(
            f"{request} has {len(request.parts)} parts and {len(notes)} descriptions of mergers; "
            f"expected {num_servers} each, one for each server"
        )
    for note in notes:
        if len(note.encode()) > MAX_NOTE_BYTES:
            raise UsageError(f"{request}: the merger's description is longer than {MAX_NOTE_BYTES}")
        build(note)


def _settings(group: Group, options: ZmqPsOptions, index: int) -> ServerSettings:
    return ServerSettings(
        index,
        group.address,
        group.token,
        group.size,
        options.staleness,
        options.slice_bytes,
        beside=options.num_dedicated == 0,
        records=group.recorder is not None,
    )


def open_backend(group: Group, raw_options: object) -> ZmqPsBackend:
    """Start the server beside this worker where one belongs, and join all servers.

    Raises:
        UsageError: options and group do not fit.
        RunFailed: the server process could not be started.
        RankLost: another member was lost meanwhile.
        DeadlineExceeded: another member did not come.
    """
    options = cast(ZmqPsOptions, raw_options)
    num_servers = check_group(group, options)
    dedicated = options.num_dedicated
    start_up_s = max(group.deadline_s, START_UP_S)
    own: ServerProcess | None = None
    try:
        if not dedicated and group.rank < num_servers:
            own = ServerProcess(_settings(group, options, group.rank))
        endpoint, local = own.endpoints(start_up_s) if own else ("", "")
        endpoints = group.control.all_gather(
            f"{group.name}.endpoints",
            endpoint.encode(),
            start_up_s,
            members=group.size + dedicated,
        )
        first = group.size if dedicated else 0
        servers = [value.decode() for value in endpoints[first : first + num_servers]]
        if own is not None:
            servers[own.index] = local
        return ZmqPsBackend(group, options, servers, own)
    except BaseException:
        if own is not None:
            own.end(0.0)
        raise


def serve(group: Group, raw_options: object) -> None:
    """What a dedicated server process runs until all workers have left.

    Args:
        group: as the workers', `rank` being this member's number on the control plane.
        raw_options: as parsed.

    Raises:
        RankLost: a member was lost before all workers had left.
    """
    options = cast(ZmqPsOptions, raw_options)
    check_group(group, options)
    waker = Waker()
    losses: list[Loss] = []

    def on_loss(loss: Loss) -> None:
        losses.append(loss)
        waker.wake()

    try:
        with zmq.Context() as context:
            settings = _settings(group, options, group.rank - group.size)
            server = Server(settings, context, group.recorder)
            try:
                group.control.all_gather(
                    f"{group.name}.endpoints",
                    server.endpoint.encode(),
                    max(group.deadline_s, START_UP_S),
                    members=group.size + options.num_dedicated,
                )
                group.control.on_loss(on_loss)
                finished = server.run(waker.fd)
            finally:
                server.close()
    finally:
        waker.close()
    if not finished:
        raise RankLost(losses[0].who, losses[0].why, "this server was serving")
