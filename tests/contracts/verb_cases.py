"""The other ops, and the bytes that all of them count, as cases that every rank runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.errors import DeadlineExceeded
from testbed.base.types import Op, Request, Traffic
from testbed.training.sampling import digest_tensors
from tests.contracts.cases import (
    DTYPES,
    SIZES,
    WITHIN_S,
    assert_same,
    device_of,
    do,
    integers,
    meet,
    normals,
    sum_of_integers,
)

# Absent ranks are known to be absent: the time only gives a wrong backend the chance to go on.
ABSENCE_S = 0.05


def fold_then_spread(
    backend: Backend, group: Group, dtype_name: str, sizes: Sequence[int] = SIZES
) -> None:
    dtype = DTYPES[dtype_name]
    for step, size in enumerate(sizes):
        tensor = integers(group.rank, size, dtype).to(device_of(backend))
        fold = backend.submit(Request(Op.FOLD, tensor, key="halves", step=step))
        assert fold.wait(WITHIN_S).tensor is tensor
        spread = backend.submit(Request(Op.SPREAD, tensor, key="halves", step=step))
        assert spread.wait(WITHIN_S).tensor is tensor
        assert_same(tensor, sum_of_integers(group.size, size, dtype), (dtype, size))


def halves_under_way(backend: Backend, group: Group) -> None:
    """Several folds before their spreads, which come back in another order, in two steps."""
    for step in range(2):
        tensors = [integers(group.rank, 500, torch.float32, salt=i) for i in range(4)]
        tensors = [t.to(device_of(backend)) for t in tensors]
        for op, order in ((Op.FOLD, (0, 1, 2, 3)), (Op.SPREAD, (2, 0, 3, 1))):
            works = [
                backend.submit(Request(op, tensors[i], key=f"layer {i}", step=step)) for i in order
            ]
            for work in works:
                work.wait(WITHIN_S)
        for i, tensor in enumerate(tensors):
            expected = sum_of_integers(group.size, 500, torch.float32, salt=i)
            assert_same(tensor, expected, (i, step))


def halves_equal_a_sum(backend: Backend, group: Group) -> str:
    """Fold and spread bring the same bits to all ranks; the digest is compared between them."""
    tensor = normals(group.rank, 10_007, torch.float32).to(device_of(backend))
    do(backend, Op.FOLD, tensor, key="bits")
    do(backend, Op.SPREAD, tensor, key="bits")
    parts = torch.stack([normals(r, 10_007, torch.float32).double() for r in range(group.size)])
    bound = group.size * torch.finfo(torch.float32).eps * parts.abs().sum(0)
    assert bool(((tensor.cpu().double() - parts.sum(0)).abs() <= bound).all())
    return digest_tensors([tensor])


def gathers(backend: Backend, group: Group, dtype_name: str) -> None:
    """Unequal sizes, one of them (and once all of them) empty."""
    dtype = DTYPES[dtype_name]
    plans = [
        [rank * 37 for rank in range(group.size)],
        [(group.size - 1 - rank) * 1001 for rank in range(group.size)],
        [0] * group.size,
        [300_001 if rank == group.size - 1 else 1 for rank in range(group.size)],
    ]
    for step, sizes in enumerate(plans):
        mine = integers(group.rank, sizes[group.rank], dtype).to(device_of(backend))
        parts = do(backend, Op.ALL_GATHER, mine, key="parts", step=step).parts
        assert len(parts) == group.size
        for rank, part in enumerate(parts):
            assert_same(part, integers(rank, sizes[rank], dtype), (sizes, rank))
        assert_same(mine, integers(group.rank, sizes[group.rank], dtype), "own")


def broadcasts(backend: Backend, group: Group, dtype_name: str) -> None:
    """From every root, and the root's own tensor stays as it was."""
    dtype = DTYPES[dtype_name]
    for root in range(group.size):
        for step, size in enumerate((0, 1, 5, 65_537)):
            tensor = integers(group.rank, size, dtype, salt=root).to(device_of(backend))
            do(backend, Op.BROADCAST, tensor, key=f"from {root}", step=step, root=root)
            assert_same(tensor, integers(root, size, dtype, salt=root), (root, size))


def barrier_waits_for_all(backend: Backend, group: Group) -> None:
    """One rank after the other stays away; the others must not go on before it has come."""
    for late in range(group.size):
        work = None
        if group.rank != late:
            work = backend.submit(Request(Op.BARRIER, key="gate", step=late))
        meet(group, "gate: the others have submitted")
        if work is not None:
            with pytest.raises(DeadlineExceeded):
                work.wait(ABSENCE_S)
            assert not work.done()
        meet(group, "gate: the others have been seen waiting")
        if work is None:
            work = backend.submit(Request(Op.BARRIER, key="gate", step=late))
        work.wait(WITHIN_S)
        assert work.done()


def wait_can_be_repeated(backend: Backend, group: Group) -> None:
    """A wait that ran out leaves the request under way; it ends when the last rank comes."""
    last = group.size - 1
    tensor = integers(group.rank, 5000, torch.float32).to(device_of(backend))
    request = Request(Op.ALL_REDUCE, tensor, key="slow one", step=4)
    if group.rank != last:
        work = backend.submit(request)
        with pytest.raises(DeadlineExceeded, match="slow one"):
            work.wait(ABSENCE_S)
        assert not work.done()
    meet(group, "the others waited in vain")
    if group.rank == last:
        work = backend.submit(request)
    work.wait(WITHIN_S)
    assert work.wait(0.0).tensor is tensor
    event = work.event
    assert (event.op, event.key, event.step) == (Op.ALL_REDUCE, "slow one", 4)
    assert event.num_bytes == 20_000
    assert event.submitted_s <= event.started_s <= event.ended_s
    assert_same(tensor, sum_of_integers(group.size, 5000, torch.float32))


def traffic_of_requests(
    backend: Backend, group: Group, ops: tuple[Op, ...]
) -> tuple[Traffic, Traffic, int]:
    """What the counters moved by, what the requests say, and who else works for this rank."""
    device = device_of(backend)
    meet(group, "before counting")
    before = backend.traffic()
    meet(group, "counted before")
    works = [
        backend.submit(Request(op, torch.ones(size, device=device), key=f"{size} elements"))
        for op in ops
        for size in (12, 120_000)
    ]
    requests = sum((work.wait(WITHIN_S).traffic for work in works), Traffic())
    meet(group, "all have everything")
    counted = backend.traffic() - before
    meet(group, "counted after")
    return counted, requests, backend.capabilities.num_helper_processes


def traffic_of_one_sum(backend: Backend, group: Group, num_elements: int) -> Traffic:
    """Bytes that one sum moved on this rank, its colocated server's included."""
    tensor = torch.ones(num_elements, device=device_of(backend))
    meet(group, "before one sum")
    before = backend.traffic()
    meet(group, "counted before one sum")
    do(backend, Op.ALL_REDUCE, tensor, key="counted")
    meet(group, "all have the sum")
    moved = backend.traffic() - before
    meet(group, "counted after one sum")
    return moved


def many(backend: Backend, group: Group, op: Op, num_elements: int, count: int) -> Traffic:
    """So many exchanges of one op, one after the other; what they counted on this rank."""
    tensor = torch.ones(num_elements, device=device_of(backend))
    before = backend.traffic()
    for step in range(count):
        if op is Op.SPREAD:
            do(backend, Op.FOLD, tensor, key="many", step=step)
        do(backend, op, tensor, key="many", step=step)
    meet(group, "all are done")
    return backend.traffic() - before
