"""The MPI backends under other options, several of which share the ranks of one job."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from mpi4py import MPI

from testbed.backends.mpi.options import RingOptions
from testbed.backends.mpi.ring import PersistentCache
from testbed.backends.protocol import Backend, Group
from testbed.base.axes import BACKENDS
from testbed.base.errors import Disagreement, RankLost, UsageError
from testbed.base.types import Op, Request, shard_bounds
from testbed.control.protocol import Loss
from tests.contracts.cases import WITHIN_S, assert_same, do, meet, normals
from tests.harness.plain_ring import plain_ring_fold, plain_ring_sum

Call = tuple[str, tuple[Any, ...]]  # `module:function` and its arguments


def under(
    backend: Backend, group: Group, spec: str, calls: Sequence[Call], **opened: Any
) -> list[Any]:
    """What cases return on a backend of its own with these options, which is closed afterwards."""
    group = replace(group, name=f"under {spec} {sorted(opened.items())}", **opened)
    mine = BACKENDS.resolve(spec).build(group)
    results = []
    for function, args in calls:
        module, _, name = function.partition(":")
        case: Callable[..., Any] = getattr(importlib.import_module(module), name)
        results.append(case(mine, group, *args))
    mine.close(WITHIN_S)
    return results


def by_priority(backend: Backend, group: Group, spec: str, calls: Sequence[Call]) -> list[Any]:
    """The same, in the order of urgency that rank 0 decides."""
    return under(backend, group, spec, calls, order="priority")


def same_bits_as_the_plain_ring(
    backend: Backend, group: Group, dtype: torch.dtype, sizes: Sequence[int]
) -> None:
    """A flat ring in segments adds in the order of the papers' ring of whole chunks."""
    comm = MPI.COMM_WORLD
    for size in sizes:
        for op, plainly in ((Op.ALL_REDUCE, plain_ring_sum), (Op.FOLD, plain_ring_fold)):
            tensor, plain = normals(group.rank, size, dtype), normals(group.rank, size, dtype)
            do(backend, op, tensor, key=f"{op} {size}")
            plainly(comm, plain)
            bounds = shard_bounds(size, group.size)[group.rank :][:2]
            kept = slice(None) if op is Op.ALL_REDUCE else slice(*bounds)
            assert_same(tensor[kept], plain[kept], (op, size))


def parameter_is_summed(backend: Backend, group: Group) -> None:
    """A tensor that gradients are computed for."""
    parameter = torch.nn.Parameter(torch.ones(3))
    do(backend, Op.ALL_REDUCE, parameter, key="parameter")
    assert parameter.tolist() == [group.size] * 3


def switch_that_holds(backend: Backend, group: Group, spec: str) -> str | None:
    """The switch that was measured holds for whoever opens the ring again with these options."""
    first = BACKENDS.resolve(spec).build(replace(group, name=f"first {spec}"))
    settled = first.capabilities.settled
    first.close(WITHIN_S)
    if settled is None:
        return None
    assert isinstance(settled, RingOptions)
    assert settled.fixed_switch_bytes is not None
    text = f"mpi-ring:switch_bytes={settled.switch_bytes},segment_kib={settled.segment_kib}"
    again = BACKENDS.resolve(text).build(replace(group, name=f"again {spec}"))
    assert again.capabilities.settled == settled
    again.close(WITHIN_S)
    return settled.switch_bytes


class Aside:
    """A group's control plane whose losses and failures stay among the ranks of a case."""

    def __init__(self, group: Group) -> None:
        self._control = group.control
        self.rank, self.size, self.state = group.rank, group.size, ""
        self.loss: Loss | None = None
        self.failures: list[str] = []
        self._loss_callbacks: list[Callable[[Loss], None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    def report_failure(self, why: str) -> None:
        self.failures.append(why)

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        self._loss_callbacks.append(callback)

    def lose(self, loss: Loss) -> None:
        self.loss = loss
        for callback in self._loss_callbacks:
            callback(loss)


def loss_ends_the_thread(backend: Backend, group: Group, spec: str) -> None:
    """Rank 1 never joins the sum; rank 0 learns that it is lost."""
    control, before = Aside(group), mpi_threads()
    own = replace(group, name=f"bereaved {spec}", num_channels=2, control=control)
    mine = BACKENDS.resolve(spec).build(own)
    (thread,) = set(mpi_threads()) - set(before)
    if group.rank == 0:
        work = mine.submit(Request(Op.ALL_REDUCE, torch.ones(1_000_000), key="weight", step=7))
        mine.submit(Request(Op.ALL_REDUCE, torch.ones(10), channel=1))
    control.lose(Loss(1 - group.rank, f"rank {1 - group.rank}", "it was killed"))
    if group.rank == 0:
        with pytest.raises(RankLost, match=r"rank 1 is lost: it was killed.*'weight'.*step 7"):
            work.wait(10)
        with pytest.raises(RankLost):
            mine.submit(Request(Op.BARRIER)).wait(10)
    mine.close(WITHIN_S)
    thread.join(10)
    assert not thread.is_alive()
    meet(group, "one is lost")


def disagreement_ends_the_thread(backend: Backend, group: Group, spec: str) -> None:
    """What the collectives raise reaches the waiting caller and the control plane."""
    control, before = Aside(group), mpi_threads()
    mine = BACKENDS.resolve(spec).build(
        replace(group, name=f"disagreeing {spec}", num_channels=1, control=control)
    )
    (thread,) = set(mpi_threads()) - set(before)
    dtype = torch.float32 if group.rank == 0 else torch.int64
    words = r"rank 0: torch.float32, rank 1: torch.int64.*of 'scores' \(.* in step 7"
    request = Request(Op.ALL_GATHER, torch.zeros(3, dtype=dtype), key="scores", step=7)
    with pytest.raises(Disagreement, match=words):
        mine.submit(request).wait(10)
    thread.join(10)
    assert not thread.is_alive()
    assert [why.partition(":")[0] for why in control.failures] == ["Disagreement"]
    mine.close(WITHIN_S)
    meet(group, "they disagreed")


def mpi_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "mpi"]


def refusals(backend: Backend, group: Group) -> None:
    """Words of the errors, on one rank."""
    mine = BACKENDS.resolve("mpi-ring").build(replace(group, name="refusing", num_channels=1))
    refused = {
        "not contiguous": Request(Op.ALL_REDUCE, torch.zeros(4, 4).t()),
        "expected one of float64, float32": Request(
            Op.ALL_REDUCE, torch.zeros(3, dtype=torch.bool)
        ),
        "'mpi-ring' takes cpu": Request(Op.ALL_REDUCE, torch.zeros(3, device="meta")),
        "it can all-gather": Request(Op.APPLY, torch.zeros(3)),
        "has 2 dimensions; expected one": Request(Op.ALL_GATHER, torch.zeros(2, 2)),
        "expected a rank below 1": Request(Op.BROADCAST, torch.zeros(3), root=1),
        "has no tensor": Request(Op.ALL_REDUCE),
        "was given a tensor": Request(Op.BARRIER, torch.zeros(1)),
        "numbered from 0": Request(Op.ALL_REDUCE, torch.zeros(3), channel=1),
    }
    for message, request in refused.items():
        with pytest.raises(UsageError, match=message):
            mine.submit(request)
    mine.close(WITHIN_S)
    with pytest.raises(UsageError, match="closed"):
        mine.submit(Request(Op.BARRIER))
    with pytest.raises(UsageError, match="blocking=1"):
        BACKENDS.resolve("mpi:blocking=1").build(replace(group, name="two", num_channels=2))


class Pair:
    """Two persistent requests from a rank to itself."""

    def __init__(self) -> None:
        self.requests = [MPI.COMM_SELF.Send_init(bytearray(4), 0) for _ in range(2)]


def persistent_requests_are_bounded(backend: Backend, group: Group) -> None:
    cache: PersistentCache[Pair] = PersistentCache(max_requests=6)
    pairs = {key: Pair() for key in "abcd"}
    for key in "abcabcd":  # a is the least recently used when d comes
        assert cache.get(key, lambda key=key: pairs[key]) is pairs[key]
    assert len(cache) == 3
    assert [request == MPI.REQUEST_NULL for request in pairs["a"].requests] == [True, True]
    assert pairs["b"].requests[0] != MPI.REQUEST_NULL
    cache.clear()
    assert pairs["b"].requests[0] == MPI.REQUEST_NULL
    assert len(cache) == 0
