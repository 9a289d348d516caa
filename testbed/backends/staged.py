"""Wrappers around any backend: GPU tensors through pinned host memory, and delayed exchanges.

Copies of a GPU's tensors run on a stream of their own; the thread that submits never waits for
them. The host buffer of a key is kept, so that its memory stays where it is from step to step (a
backend may have prepared requests for it). Payloads, whose sizes change from step to step, get a
buffer for the time of their exchange.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from testbed.backends.channels import ThreadedBackend
from testbed.backends.protocol import Backend, ExternalFramework, Group, Work
from testbed.backends.queue import PendingWork
from testbed.base.types import Capabilities, Event, Op, Request, Result, Traffic

# A start-up for each exchange, as models of a start-up and a time per byte have it: what
# `latency_by=injected` asks for. A network's latency is its packets' (`cluster.relay`, netem).
#
# An exchange first waits the latency (start-up: it loads no link), then the inner backend moves its
# bytes. The wait is the channel's, not the caller's: exchanges of one channel wait and move one
# after another, those of several channels beside each other, and with `order=priority` the most
# urgent is chosen before it waits, as in a backend that is opened so. An exchange costs one
# latency, however many messages its algorithm is made of; a barrier none.

CLOSE_SHARE = 0.5
# Only the loss of a rank ends the wait for the inner backend: the deadline is that of `Work.wait`,
# which the caller has.
WAIT_S = 1e6


class DelayedBackend(ThreadedBackend):
    """See `Backend`.

    Args:
        inner: opened; runs the requests of a channel as they are submitted.
        group: the job, with the order, channels and latency that the caller asked for. With jitter,
            each rank draws for each exchange how much less or more it waits.
    """

    def __init__(self, inner: Backend, group: Group) -> None:
        self._inner = inner
        self._latency_s, self._jitter_s = group.latency_s, group.jitter_s
        self._drawn = random.Random(f"{group.name}/{group.rank}")
        own = replace(group, name=f"{group.name}.delayed")
        super().__init__(own, "delayed", inner.capabilities, self._start_late)

    def traffic(self) -> Traffic:
        """See `Backend.traffic`."""
        return self._inner.traffic()

    def close(self, timeout_s: float = 10.0) -> None:
        """See `Backend.close`."""
        super().close(CLOSE_SHARE * timeout_s)
        self._inner.close((1 - CLOSE_SHARE) * timeout_s)

    def _start_late(self, request: Request) -> Result:
        if request.op is not Op.BARRIER:
            spread_s = self._jitter_s * self._drawn.uniform(-1, 1)
            time.sleep(max(0.0, self._latency_s + spread_s))
        return self._inner.submit(request).wait(WAIT_S)


def open_delayed(open_inner: Callable[[Group], Backend], group: Group) -> Backend:
    """Open a backend behind the group's latency; the backend itself where there is none.

    Args:
        open_inner: opens the backend in a group; collective.
        group: the job as the caller asked for it.
    """
    if group.latency_s <= 0:
        return open_inner(group)
    inner = open_inner(replace(group, order="fifo", credit_bytes=None))
    return DelayedBackend(inner, group)


# Their sizes change from step to step, and their results are new tensors.
OF_ANY_SIZE = frozenset({Op.ALL_GATHER, Op.ALL_TO_ALL, Op.MERGE})


class Copier(Protocol):
    """Copies to and from a device; a token stands for a copy that may still be running."""

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """A host buffer of the tensor's shape and dtype."""
        ...

    def down(self, tensor: torch.Tensor, host: torch.Tensor) -> object:
        """Start copying to the host, after what the caller's stream has queued so far."""
        ...

    def up(self, host: torch.Tensor, tensor: torch.Tensor) -> object:
        """Start copying back."""
        ...

    def settle(self, token: object) -> None:
        """Block this thread until the copy is done."""
        ...

    def follow(self, token: object) -> None:
        """Make the caller's stream wait for the copy, without blocking this thread."""
        ...


class CudaCopier:
    """Copies on one extra stream of a CUDA device, through pinned memory."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned memory, or the copies would not run beside the computation."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def down(self, tensor: torch.Tensor, host: torch.Tensor) -> torch.cuda.Event:
        """See `Copier.down`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._copy(tensor, host, tensor)

    def up(self, host: torch.Tensor, tensor: torch.Tensor) -> torch.cuda.Event:
        """See `Copier.up`."""
        return self._copy(host, tensor, tensor)

    def settle(self, token: object) -> None:
        """See `Copier.settle`."""
        assert isinstance(token, torch.cuda.Event)
        token.synchronize()

    def follow(self, token: object) -> None:
        """See `Copier.follow`."""
        assert isinstance(token, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(token)

    def _copy(
        self, source: torch.Tensor, into: torch.Tensor, on_device: torch.Tensor
    ) -> torch.cuda.Event:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            done.record(self._stream)
        on_device.record_stream(self._stream)
        return done


@dataclass(frozen=True)
class _Departure:
    work: StagedWork
    hosts: tuple[torch.Tensor, ...]
    tokens: tuple[object, ...]
    lands: bool  # its result goes to the device


class StagedWork(PendingWork):
    """A request whose result is on its way back to the device when `wait` returns.

    The caller's stream waits for that copy; the host does not.
    """

    def __init__(self, request: Request, deadline_s: float, copier: Copier) -> None:
        super().__init__(request, deadline_s)
        self._copier = copier
        self.landing: object | None = None
        self.inner: Work | None = None

    @property
    def event(self) -> Event:
        """See `PendingWork.event`; it starts when the inner backend moves its bytes."""
        own = super().event
        return own if self.inner is None else replace(own, started_s=self.inner.event.started_s)

    def wait(self, timeout_s: float | None = None) -> Result:
        """See `Work.wait`."""
        result = super().wait(timeout_s)
        if self.landing is not None:
            self._copier.follow(self.landing)
        return result


class StagedBackend:
    """See `Backend`; takes tensors of the device beside those that the inner backend takes."""

    def __init__(self, inner: Backend, copier: Copier, device_type: str, deadline_s: float) -> None:
        self.rank, self.size = inner.rank, inner.size
        self._inner = inner
        self._copier = copier
        self._device_type = device_type
        self._deadline_s = deadline_s
        kinds = inner.capabilities.device_types | {device_type}
        self.capabilities: Capabilities = replace(inner.capabilities, device_types=kinds)
        self._buffers: dict[tuple[str, torch.Size, torch.dtype], torch.Tensor] = {}
        self._departures: queue.SimpleQueue[_Departure | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._depart, name="staging", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Work:
        """See `Backend.submit`; tensors of the host wait for their turn behind those of the device.

        What overtook them here and not on another rank would be exchanged with something else.
        """
        given = request.tensors
        work = StagedWork(request, self._deadline_s, self._copier)
        if not any(tensor.device.type == self._device_type for tensor in given):
            self._departures.put(_Departure(work, given, (), lands=False))
            return work
        hosts = tuple(self._buffer(request, tensor) for tensor in given)
        # A spread continues with the host buffer in which the fold left its shard.
        folded = request.op is Op.SPREAD
        pairs = () if folded else zip(given, hosts, strict=True)
        tokens = tuple(self._copier.down(tensor, host) for tensor, host in pairs)
        self._departures.put(_Departure(work, hosts, tokens, lands=True))
        return work

    def traffic(self) -> Traffic:
        """See `Backend.traffic`; copies between host and device are not on the wire."""
        return self._inner.traffic()

    def close(self, timeout_s: float = 10.0) -> None:
        """See `Backend.close`."""
        self._departures.put(None)
        self._thread.join(timeout_s)
        self._inner.close(timeout_s)

    def _buffer(self, request: Request, tensor: torch.Tensor) -> torch.Tensor:
        if request.op in OF_ANY_SIZE:
            return self._copier.buffer(tensor)
        name = (request.key, tensor.shape, tensor.dtype)
        if name not in self._buffers:
            self._buffers[name] = self._copier.buffer(tensor)
        return self._buffers[name]

    def _depart(self) -> None:
        """Hand requests on in the order of submission, each once its bytes are on the host."""
        while (departure := self._departures.get()) is not None:
            work, hosts = departure.work, departure.hosts
            try:
                for token in departure.tokens:
                    self._copier.settle(token)
                work.start()
                inner = work.inner = self._inner.submit(_with(work.request, hosts))
            except Exception as error:  # raised by `wait` of this request
                work.fail(error)
                continue
            inner.when_done(partial(self._land, inner, departure))

    def _land(self, inner: Work, departure: _Departure) -> None:
        work, hosts = departure.work, departure.hosts
        request, tensor = work.request, work.request.tensor
        try:
            result = inner.wait(0)
            if not departure.lands:
                tensor = result.tensor
            elif request.op in OF_ANY_SIZE:
                device = request.tensors[0].device
                parts = tuple(part.to(device) for part in result.parts)
                if request.op is Op.MERGE and result.tensor is not None:
                    tensor = result.tensor.to(device)
                result = replace(result, parts=parts)
            elif request.op is not Op.FOLD and tensor is not None:
                work.landing = self._copier.up(hosts[0], tensor)
        except Exception as error:  # raised by `wait` of this request
            work.fail(error)
            return
        work.finish(replace(result, tensor=tensor))


def _with(request: Request, hosts: tuple[torch.Tensor, ...]) -> Request:
    """The same request with these tensors."""
    if request.tensor is None:
        return replace(request, parts=hosts)
    return replace(request, tensor=hosts[0])


class StagedFramework(StagedBackend):
    """See `ExternalFramework`: its wrapper takes the device's tensors; its ops are staged."""

    def __init__(
        self, inner: ExternalFramework, copier: Copier, device_type: str, deadline_s: float
    ) -> None:
        super().__init__(inner, copier, device_type, deadline_s)
        self.fixed_graph, self.raises_late = inner.fixed_graph, inner.raises_late
        self.wrap, self.hold_back = inner.wrap, inner.hold_back
        self.set_timeout, self.broke = inner.set_timeout, inner.broke
        self.count_step = inner.count_step


def staged(inner: Backend, device: str, deadline_s: float) -> Backend:
    """The backend, able to take tensors of the device; itself if it already is.

    What is another framework stays one: else its plan would be carried out here under its name.
    """
    device_type = device.partition(":")[0]
    if device_type in inner.capabilities.device_types:
        return inner
    copier = CudaCopier(device)
    if isinstance(inner, ExternalFramework):
        return StagedFramework(inner, copier, device_type, deadline_s)
    return StagedBackend(inner, copier, device_type, deadline_s)
