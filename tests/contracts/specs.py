"""The backends that the contract is held to: the registry's members, and variants of some."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from testbed.backends.torch_groups.nccl import nccl_version
from testbed.base.axes import BACKENDS, BackendFacts
from testbed.base.errors import Unavailable
from tests.harness.rank_agent import Setup
from tests.harness.rank_pool import Job


@dataclass(frozen=True)
class Member:
    """One backend specification under test.

    Attributes:
        text: as a user writes it.
        quick: numbers of ranks in the default suite.
        slow: numbers of ranks that only `-m slow` runs.
        max_channels: channels that these options allow.
        device: where the tensors live.
        reason: why it cannot run here; empty = it can.
    """

    text: str
    quick: tuple[int, ...] = (1, 2, 3)
    slow: tuple[int, ...] = (4,)
    max_channels: int = 3
    device: str = "cpu"
    reason: str = ""

    @property
    def facts(self) -> BackendFacts:
        return BACKENDS.resolve(self.text).facts

    @property
    def moves(self) -> bool:
        """Whether it communicates at all."""
        if self.reason:
            return True
        return self.facts.consistency != "none"

    @property
    def num_servers(self) -> int:
        """Dedicated server processes of its jobs."""
        if self.reason:
            return 0
        return self.facts.num_servers

    @property
    def follows_plans(self) -> bool:
        """Whether schedulers decide when its messages leave."""
        if self.reason:
            return True
        return self.facts.schedule is None


def forgetting(member: Member) -> Member:
    """The member with servers that keep nothing: those of a pool stay up between trainings.

    Servers that encode means again are compared in test_compressed_verification.
    """
    return replace(member, text="zmq-ps:repack=0") if member.text == "zmq-ps" else member


# What a kind does not declare and its options decide.
VARIANTS = (
    Member("zmq-ps:servers=dedicated:2", quick=(2,), slow=(3,)),
    Member("zmq-ps:servers=colocated:1", quick=(2,), slow=(3,)),
    Member("mpi-ring:levels=2,group_size=2", quick=(4,), slow=(2,)),
    Member("mpi:blocking=1", quick=(2,), slow=(3,), max_channels=1),
)


def _registered(name: str) -> Member:
    member = Member(name)
    try:
        facts = BACKENDS.resolve(name).usable().facts
    except Unavailable as error:
        return replace(member, quick=(1,), slow=(), reason=str(error))
    if "cpu" not in facts.device_types:
        few = tuple(n for n in member.quick if n <= most_nccl_ranks())
        channels = member.max_channels if max(few) <= torch.cuda.device_count() else 1
        return replace(member, quick=few, slow=(), max_channels=channels, device="cuda")
    return replace(member, quick=(1, 2, 3, 4), slow=()) if facts.in_process else member


def most_nccl_ranks() -> int:
    """As many as there are GPUs; two on one, where NCCL was told to allow that."""
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and nccl_version() >= (2, 30)
    return max(2 if shared else 0, torch.cuda.device_count())


def _variant(member: Member) -> Member:
    try:
        BACKENDS.resolve(member.text).usable()
    except Unavailable as error:
        return replace(member, quick=member.quick[:1], slow=(), reason=str(error))
    return member


MEMBERS = tuple(map(_registered, BACKENDS)) + tuple(map(_variant, VARIANTS))
MOVING = tuple(m for m in MEMBERS if m.moves)
SILENT = tuple(m for m in MEMBERS if not m.moves)
WITH_SERVERS = tuple(m for m in MOVING if m.num_servers > 0)
WITHOUT_SERVERS = tuple(m for m in MOVING if m.num_servers == 0)
# Servers that run the optimizer; only training concerns them, so most tests leave them out.
SERVING = (_variant(Member("zmq-ps:update=server", quick=(2,), slow=(4,))),)
DEFAULTS = tuple(m for m in MOVING if ":" not in m.text)
SCHEDULED = tuple(m for m in DEFAULTS if m.follows_plans)


def samples_of_each_sort() -> tuple[Member, ...]:
    """One default member of each sort of start: threads, own processes, an MPI launcher."""
    able = [m for m in DEFAULTS if not m.reason and m.device == "cpu"]
    sorts = {(m.facts.in_process, m.facts.needs_mpi): m for m in able}
    return tuple(sorts.values())


def job_of(member: Member, num_ranks: int) -> Job:
    """The job that holds a member's tests at this number of ranks."""
    setup = Setup("fifo", member.max_channels)
    return Job(member.text, num_ranks, setup, member.device)


def jobs(
    members: Iterable[Member],
    counts: Callable[[int], bool] = lambda n: True,
    quick: Sequence[int] | None = None,
) -> list[Any]:
    """One pytest parameter per member and number of ranks.

    Args:
        members: which.
        counts: which numbers of ranks.
        quick: numbers of ranks that stay in the default suite; None = as the member says.
    """
    found: list[Any] = []
    for member in members:
        for n in sorted(filter(counts, member.quick + member.slow)):
            is_quick = n in member.quick and (quick is None or n in quick)
            marks = [] if is_quick or member.reason else [pytest.mark.slow]
            if member.reason:
                marks.append(pytest.mark.skip(reason=member.reason))
            elif member.facts.needs_mpi:
                marks.append(pytest.mark.mpi)
            found.append(pytest.param(job_of(member, n), marks=marks, id=f"{member.text}-{n}"))
    return found


def many(num_ranks: int) -> bool:
    """More than one rank."""
    return num_ranks > 1
