"""Latency that the testbed makes itself: who waits, how long, and in which order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from testbed.backends.protocol import Backend, Group
from testbed.backends.staged import DelayedBackend, open_delayed
from testbed.base.axes import BACKENDS
from testbed.base.errors import UsageError
from testbed.base.types import Op, Request
from testbed.control.inproc import InprocHub

LATENCY_S = 0.02


@contextmanager
def ranks(**group: Any) -> Iterator[list[Backend]]:
    """Two ranks of `loopback` behind a network with latency."""
    kind = BACKENDS.load("loopback")
    hub = InprocHub(2)
    found: dict[int, Backend] = {}

    def join(rank: int) -> None:
        mine = Group(rank, 2, hub.member(rank), latency_s=LATENCY_S, **group)
        found[rank] = open_delayed(lambda g: kind.build(g, kind.options()), mine)

    together(join)
    yield [found[0], found[1]]
    together(lambda rank: found[rank].close())


def together(body: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def request(rank: int, key: str, **more: Any) -> Request:
    return Request(Op.ALL_REDUCE, torch.full((4,), float(rank + 1)), key=key, step=0, **more)


def test_each_exchange_of_a_channel_waits_after_the_one_before_it() -> None:
    with ranks() as backends:
        works = [[b.submit(request(r, k)) for k in "abc"] for r, b in enumerate(backends)]
        for mine in works:
            assert [w.wait().tensor.tolist() for w in mine] == [[3.0] * 4] * 3  # type: ignore[union-attr]
            events = [w.event for w in mine]
            for event in events:
                assert event.ended_s - event.started_s >= LATENCY_S
            for first, second in itertools.pairwise(events):
                assert second.started_s >= first.ended_s


def test_channels_wait_beside_each_other() -> None:
    with ranks(num_channels=2) as backends:
        works = [
            [b.submit(request(r, f"{c}", channel=c)) for c in range(2)]
            for r, b in enumerate(backends)
        ]
        for mine in works:
            for work in mine:
                work.wait()
            first, second = (w.event for w in mine)
            assert second.started_s < first.ended_s
            assert first.started_s < second.ended_s


def test_the_most_urgent_goes_first_once_the_channel_is_free() -> None:
    with ranks(order="priority") as backends:
        works = []
        for rank, backend in enumerate(backends):
            running = backend.submit(request(rank, "running", priority=5))
            late = backend.submit(request(rank, "late", priority=9))
            urgent = backend.submit(request(rank, "urgent", priority=0))
            works.append((running, late, urgent))
        for _, late, urgent in works:
            late.wait()
            urgent.wait()
            assert urgent.event.started_s <= late.event.started_s


def test_what_the_backend_did_not_declare_is_refused_at_once() -> None:
    with ranks() as backends, pytest.raises(UsageError, match="channel is 3"):
        backends[0].submit(request(0, "a", channel=3))


def test_a_barrier_costs_no_latency_and_no_latency_no_wrapper() -> None:
    kind = BACKENDS.load("loopback")
    alone = Group(0, 1, InprocHub(1).member(0))
    backend = open_delayed(lambda g: kind.build(g, kind.options()), alone)
    assert not isinstance(backend, DelayedBackend)
    backend.close()
