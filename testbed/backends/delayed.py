"""A network with latency, where the kernel cannot make one: each exchange starts late.

A wrapper around any backend. An exchange first waits the latency (start-up: it loads no link), then
the inner backend moves its bytes. The wait is the channel's, not the caller's: exchanges of one
channel wait and move one after another, those of several channels beside each other, and with
`order=priority` the most urgent is chosen before it waits, as in a backend that is opened so.
An exchange costs one latency, however many messages its algorithm is made of; a barrier none.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

from testbed.backends.channels import ThreadedBackend
from testbed.backends.protocol import Backend, Group
from testbed.base.types import Op, Request, Result, Traffic

CLOSE_SHARE = 0.5
# Only the loss of a rank ends the wait for the inner backend: how long is too long is for whoever
# waits for the exchange to say.
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
