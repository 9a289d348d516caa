"""Ranks that are threads of one process: the plain reference for all other backends."""

from __future__ import annotations

import threading
from collections import defaultdict

import torch

from testbed.backends.channels import ThreadedBackend
from testbed.backends.checks import one_dtype
from testbed.backends.protocol import Group
from testbed.base.axes import BackendFacts
from testbed.base.errors import DeadlineExceeded, RankLost, UsageError
from testbed.base.parts import NoOptions, Part
from testbed.base.types import (
    SERVERLESS_OPS,
    Capabilities,
    Op,
    Request,
    Result,
    Traffic,
    shard_bounds,
)
from testbed.control.inproc import InprocControl
from testbed.control.protocol import Loss

Given = tuple[torch.Tensor, ...]  # one tensor, or for an all-to-all one part for each rank


class Meeting:
    """Where the threads of a group exchange tensors: each gives one, then each gets all."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._given: dict[tuple[object, ...], dict[int, Given]] = defaultdict(dict)
        self._taken: dict[tuple[object, ...], int] = defaultdict(int)
        self._turns: dict[tuple[int, int], int] = defaultdict(int)
        self._loss: Loss | None = None

    def exchange(self, rank: int, request: Request, limit_s: float) -> list[Given]:
        """Copies of what all ranks gave, in rank order."""
        given = tuple(tensor.detach().clone() for tensor in request.tensors)
        with self._changed:
            # A channel's k-th request meets the others' k-th, whatever it is called.
            turn = self._turns[rank, request.channel]
            self._turns[rank, request.channel] += 1
            key = (request.channel, turn, request.op, request.key, request.step)
            self._given[key][rank] = given
            self._changed.notify_all()
            everybody = self._changed.wait_for(
                lambda: len(self._given[key]) == self._size or self._loss is not None, limit_s
            )
            if self._loss is not None:
                raise RankLost(self._loss.who, self._loss.why, f"this rank was in {request}")
            if not everybody:
                absent = [r for r in range(self._size) if r not in self._given[key]]
                raise DeadlineExceeded(f"{request}: rank {absent} did not come in {limit_s:g} s")
            everything = [self._given[key][r] for r in range(self._size)]
            self._taken[key] += 1
            if self._taken[key] == self._size:
                del self._given[key], self._taken[key]
            return everything

    def on_loss(self, loss: Loss) -> None:
        """End all waits."""
        with self._changed:
            self._loss = loss
            self._changed.notify_all()


class LoopbackBackend(ThreadedBackend):
    """See `Backend`. Additions happen in rank order."""

    def __init__(self, group: Group) -> None:
        control = group.control
        if not isinstance(control, InprocControl):
            raise UsageError(
                "backend 'loopback' joins threads of one process; it cannot join the processes "
                "that mpirun, torchrun or srun started; run it without a launcher"
            )
        self._meeting: Meeting = control.share(group.name, lambda: Meeting(group.size))
        control.on_loss(self._meeting.on_loss)
        self._limit_s = group.deadline_s
        capabilities = Capabilities(SERVERLESS_OPS, num_channels=group.num_channels)
        super().__init__(group, "loopback", capabilities, self._perform)

    @torch.no_grad()  # a tensor may be a parameter
    def _perform(self, request: Request) -> Result:
        given = self._meeting.exchange(self.rank, request, self._limit_s)
        traffic = Traffic(local_bytes=2 * request.num_bytes, num_messages=1)
        if request.op is Op.ALL_TO_ALL:
            one_dtype([parts[0].dtype for parts in given])
            return Result(parts=tuple(parts[self.rank] for parts in given), traffic=traffic)
        if request.tensor is None:
            return Result(traffic=traffic)
        tensors = [tensor for (tensor,) in given]
        if request.op is Op.ALL_GATHER:
            return Result(request.tensor, tuple(tensors), traffic)
        self._write(request, request.tensor, tensors)
        return Result(request.tensor, traffic=traffic)

    def _write(self, request: Request, tensor: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        flat = tensor.view(-1)
        bounds = shard_bounds(flat.numel(), self.size)
        if request.op is Op.BROADCAST:
            tensor.copy_(tensors[request.root])
        elif request.op is Op.ALL_REDUCE:
            tensor.copy_(_sum(tensors))
        elif request.op is Op.FOLD:
            mine = slice(bounds[self.rank], bounds[self.rank + 1])
            flat[mine] = _sum([t.view(-1)[mine] for t in tensors])
        else:
            for owner, given in enumerate(tensors):
                shard = slice(bounds[owner], bounds[owner + 1])
                flat[shard] = given.view(-1)[shard]


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def open_loopback(group: Group, options: NoOptions) -> LoopbackBackend:
    """`loopback`: the ranks are threads of one process, and every op is a copy in memory.

        all-reduce: every rank gets x_0 + x_1 + ... + x_(n-1), added in rank order

    Cost: no network, so that no time is predicted; each rank copies n tensors and adds n - 1. An op
    of M bytes counts as one message and 2 M local bytes.

    Args:
        group: the job; its control plane must be that of threads (`InprocControl`).
        options: none.

    Raises:
        UsageError: the ranks are processes, or an option is given; there are none.
        RankLost: of a request: another rank failed.
        DeadlineExceeded: of a request: another rank did not submit it within `group.deadline_s`
            seconds.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from testbed.control.inproc import InprocHub
        >>> hub = InprocHub(2)
        >>> def run_rank(rank: int) -> list[float]:
        ...     backend = open_loopback(Group(rank, 2, hub.member(rank)), NoOptions())
        ...     work = backend.submit(Request(Op.ALL_REDUCE, torch.tensor([1.0, rank])))
        ...     tensor = work.wait().tensor
        ...     backend.close()
        ...     return tensor.tolist()
        >>> with ThreadPoolExecutor() as ranks:
        ...     list(ranks.map(run_rank, range(2)))
        [[2.0, 1.0], [2.0, 1.0]]

    Reference:
        MPI Forum, 2021, MPI 4.0, chapter 6: what each op must do. Departs: an all-gather takes
        tensors of different sizes, and their sizes need not be known before.
    """
    return LoopbackBackend(group)


LOOPBACK = Part(
    name="loopback",
    summary="threads of one process: the reference for tests",
    build=open_loopback,
    facts=lambda options: BackendFacts(in_process=True),
)
