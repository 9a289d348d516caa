"""What rank 0 chooses ahead, and that every rank hears of it before the channel is free."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest
import torch

from testbed.backends.protocol import Backend, Group
from testbed.backends.queue import PendingWork, RequestQueue
from testbed.base.types import Op, Request, Result
from testbed.control.inproc import InprocHub
from tests.harness.two_ranks import on_ranks

BYTES = 40


def nobody_to_wake() -> None:
    """There is no backend's thread to wake."""


class Ranks:
    """The queues of two ranks in one process, and what was announced to both."""

    def __init__(
        self,
        credit_bytes: int | None,
        num_channels: int = 1,
        wake: Callable[[], None] = nobody_to_wake,
    ) -> None:
        self.hub = InprocHub(2)
        self.queues = [
            RequestQueue(
                Group(
                    rank=rank,
                    size=2,
                    control=self.hub.member(rank),
                    order="priority",
                    num_channels=num_channels,
                    credit_bytes=credit_bytes,
                ),
                wake,
            )
            for rank in range(2)
        ]
        self.frames: list[list[str]] = []
        self.hub.member(1).listen("backend.order", self._hear)

    def _hear(self, announcement: bytes) -> None:
        self.frames.append([key for _, _, key, _ in msgspec.msgpack.decode(announcement)])

    @property
    def announced(self) -> list[str]:
        return [key for frame in self.frames for key in frame]

    def submit(self, rank: int, key: str, priority: int, step: int = 0, channel: int = 0) -> None:
        tensor = torch.zeros(BYTES // 4)
        request = Request(
            Op.ALL_REDUCE, tensor, key=key, priority=priority, step=step, channel=channel
        )
        self.queues[rank].submit(request)

    def taken(self, rank: int, channel: int = 0) -> PendingWork:
        work = self.queues[rank].take(channel)
        assert work is not None
        return work


@pytest.mark.parametrize(
    ("credit_bytes", "num_ahead"), [(None, 1), (1, 1), (BYTES, 1), (BYTES + 1, 2), (3 * BYTES, 3)]
)
def test_choices_are_announced_until_the_credit_is_used_up(credit_bytes, num_ahead):
    ranks = Ranks(credit_bytes)
    for number in range(6):
        ranks.submit(0, f"m{number}", priority=-number)
    assert len(ranks.announced) == num_ahead  # and nobody took any of them yet
    running = ranks.taken(0)
    assert len(ranks.announced) == num_ahead
    ranks.queues[0].finish(running, Result())
    assert ranks.queues[0].take(0) is not None
    assert len(ranks.announced) == num_ahead + 1
    assert ranks.announced[num_ahead] == "m5"  # the most urgent of those that were left


def test_what_has_room_at_once_is_one_announcement():
    ranks = Ranks(4 * BYTES)
    for number in range(8):
        ranks.submit(0, f"m{number}", priority=0)
    assert [len(frame) for frame in ranks.frames] == [1] * 4
    works = [ranks.taken(0) for _ in range(4)]
    for work in works:
        ranks.queues[0].finish(work, Result())
    ranks.queues[0].take(0)
    assert [len(frame) for frame in ranks.frames] == [1] * 4 + [4]


def test_older_steps_are_chosen_first_and_what_was_chosen_stays():
    ranks = Ranks(2 * BYTES)
    for key, priority, step in (("a", 9, 1), ("b", 8, 1), ("young", 0, 3), ("old", 5, 2)):
        ranks.submit(0, key, priority, step)
    assert ranks.announced == ["a", "b"]
    for _ in range(2):
        ranks.queues[0].finish(ranks.taken(0), Result())
    ranks.queues[0].take(0)
    assert ranks.announced == ["a", "b", "old", "young"]


def test_another_rank_runs_the_announced_order_whatever_it_has_first():
    ranks = Ranks(10 * BYTES, num_channels=2)
    for key, channel in (("a", 0), ("x", 1), ("b", 0), ("c", 0)):
        ranks.submit(0, key, 0, channel=channel)
    for key in ("c", "b"):
        ranks.submit(1, key, 0)
    assert ranks.queues[1].take(0) is None  # "a" is due and not here yet
    ranks.submit(1, "a", 0)
    assert [ranks.taken(1).request.key for _ in range(3)] == ["a", "b", "c"]
    assert [ranks.taken(0).request.key for _ in range(3)] == ["a", "b", "c"]
    assert ranks.taken(0, channel=1).request.key == "x"


def test_submitting_and_taking_at_once_neither_loses_nor_blocks():
    count, order, done = 200, [], threading.Event()
    changed = threading.Condition()

    def ring() -> None:
        with changed:
            changed.notify_all()

    ranks = Ranks(3 * BYTES, wake=ring)

    def serve() -> None:
        while len(order) < count:
            with changed:  # as a backend's thread does, which a listener must be able to wake
                work = ranks.queues[0].take(0)
                while work is None:
                    if not changed.wait(30):
                        return
                    work = ranks.queues[0].take(0)
            order.append(work.request.key)
            ranks.queues[0].finish(work, Result())
        done.set()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    for number in range(count):
        ranks.submit(0, f"m{number}", priority=number % 7)
    assert done.wait(30)
    server.join()
    assert order == ranks.announced
    assert sorted(order) == sorted(f"m{number}" for number in range(count))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_waits_on_a_rank_that_reports_its_own_failure_ends_when_it_closes(rank):
    """Its own report reaches the others alone, and nobody will pick what it still waits for."""
    ranks = Ranks(credit_bytes=1)
    for key in ("a", "b"):
        ranks.submit(rank, key, priority=0)
    ranks.hub.member(rank).report_failure("the codec's table is upside down")
    assert ranks.queues[rank].busy
    ranks.queues[rank].close()
    assert ranks.queues[rank].lost
    assert not ranks.queues[rank].busy


def test_a_backend_whose_rank_failed_leaves_no_thread():
    """Here a request that rank 0 never has, so that its turn never comes."""

    def body(backend: Backend, group: Group) -> None:
        if group.rank == 1:
            backend.submit(Request(Op.ALL_REDUCE, torch.zeros(2), key="only here"))
            raise ArithmeticError("rank 1 gives up")

    before = threading.active_count()
    with pytest.raises(ArithmeticError, match="gives up"):
        on_ranks(body, order="priority")
    assert threading.active_count() == before
