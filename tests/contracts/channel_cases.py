"""Several channels at once, and the order within one, as cases that every rank runs."""

from __future__ import annotations

import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.types import Op, Request
from tests.contracts.cases import (
    WITHIN_S,
    assert_same,
    device_of,
    integers,
    meet,
    sum_of_integers,
)

PER_CHANNEL = 20
HELD_ELEMENTS = 1_000_000


def all_channels_at_once(backend: Backend, group: Group) -> None:
    """Each rank visits the channels in an order of its own and waits in reverse."""
    num_channels = backend.capabilities.num_channels
    submitted = []
    for turn in range(num_channels):
        channel = (turn + group.rank) % num_channels
        for step in range(PER_CHANNEL):
            size = 1 + (step * 4099 + channel * 31) % 20_000
            salt = step + 11 * channel
            tensor = integers(group.rank, size, torch.float32, salt=salt).to(device_of(backend))
            request = Request(Op.ALL_REDUCE, tensor, key=f"w{channel}", step=step, channel=channel)
            submitted.append((backend.submit(request), tensor, salt))
    for work, tensor, salt in reversed(submitted):
        work.wait(WITHIN_S)
        expected = sum_of_integers(group.size, tensor.numel(), torch.float32, salt=salt)
        assert_same(tensor, expected, work.event)


def one_channel_does_not_hold_another(backend: Backend, group: Group) -> None:
    """While channel 0 waits for the last rank, channel 1 goes on."""
    last = group.size - 1
    held = integers(group.rank, 100_000, torch.float32).to(device_of(backend))
    first = Request(Op.ALL_REDUCE, held, key="held", step=0, channel=0)
    works = [backend.submit(first)] if group.rank != last else []
    for step in range(5):
        tensor = integers(group.rank, 1000, torch.float32, salt=step).to(device_of(backend))
        work = backend.submit(Request(Op.ALL_REDUCE, tensor, key="free", step=step, channel=1))
        work.wait(WITHIN_S)
        assert_same(tensor, sum_of_integers(group.size, 1000, torch.float32, salt=step), step)
    assert not any(work.done() for work in works)
    meet(group, "channel 1 is through")
    if group.rank == last:
        works = [backend.submit(first)]
    works[0].wait(WITHIN_S)
    assert_same(held, sum_of_integers(group.size, 100_000, torch.float32))


def any_order_with_priorities(backend: Backend, group: Group) -> None:
    """Ranks become ready in different orders; rank 0's choice joins them."""
    count = 30
    tensors = {
        i: integers(group.rank, 100 + 37 * i, torch.float32, salt=i).to(device_of(backend))
        for i in range(count)
    }
    num_channels = backend.capabilities.num_channels
    generator = torch.Generator().manual_seed(group.rank)
    works = {}
    for i in torch.randperm(count, generator=generator).tolist():
        works[i] = backend.submit(
            Request(
                Op.ALL_REDUCE,
                tensors[i],
                key=f"layer {i}",
                priority=i,
                channel=i % num_channels,
                step=3,
            )
        )
    for i, work in works.items():
        work.wait(WITHIN_S)
        expected = sum_of_integers(group.size, tensors[i].numel(), torch.float32, salt=i)
        assert_same(tensors[i], expected, i)


def most_urgent_goes_next(backend: Backend, group: Group) -> list[str]:
    """Keys in the order in which this rank began them, the channel being held at first.

    The large request is the most urgent and comes first, so rank 0 picks it whenever it looks; it
    cannot end before the other ranks submit it, and they do so only when all else has been
    submitted on rank 0.
    """
    device = device_of(backend)
    hold = Request(Op.ALL_REDUCE, torch.ones(HELD_ELEMENTS, device=device), key="hold", priority=-1)
    urgency = {"a": 5, "b": 2, "c": 9, "d": 1, "e": 7, "f": 0, "g": 2}
    rest = [
        Request(Op.ALL_REDUCE, torch.ones(50, device=device), key=key, priority=priority)
        for key, priority in urgency.items()
    ]
    works = []
    if group.rank == 0:
        works = [backend.submit(request) for request in (hold, *rest)]
    meet(group, "all is queued on rank 0")
    if group.rank != 0:
        works = [backend.submit(request) for request in (*reversed(rest), hold)]
    for work in works:
        work.wait(WITHIN_S)
    for request in (hold, *rest):
        assert request.tensor is not None
        assert bool((request.tensor == group.size).all()), request
    events = sorted((work.event for work in works), key=lambda event: event.started_s)
    return [event.key for event in events]


def older_steps_go_first(backend: Backend, group: Group) -> list[tuple[int, str]]:
    """Steps and keys in the order in which this rank began them, the channel being held at first.

    A rank that waits for the end of an old exchange before it submits a young one must not be
    waited for by a rank that has both.
    """
    device = device_of(backend)
    hold = Request(Op.ALL_REDUCE, torch.ones(HELD_ELEMENTS, device=device), key="hold", step=1)
    young = Request(Op.ALL_REDUCE, torch.ones(50, device=device), key="young", step=3, priority=0)
    old = Request(Op.ALL_REDUCE, torch.ones(50, device=device), key="old", step=2, priority=9)
    works = []
    if group.rank == 0:
        works = [backend.submit(request) for request in (hold, young, old)]
    meet(group, "young and old are queued on rank 0")
    if group.rank != 0:
        works = [backend.submit(request) for request in (hold, old)]
        works[-1].wait(WITHIN_S)
        works.append(backend.submit(young))
    for work in works:
        work.wait(WITHIN_S)
    events = sorted((work.event for work in works), key=lambda event: event.started_s)
    return [(event.step, event.key) for event in events]
