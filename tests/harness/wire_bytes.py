"""Bytes that all ranks of a job send together for one round, by each backend's own algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.backends.mpi.flow import plan_doubling
from testbed.base.types import Op

Bounds = tuple[int, int]  # least and most


def sum_bytes(
    backend: str, num_ranks: int, num_bytes: int, element_bytes: int, switch_bytes: int
) -> int:
    """A ring's 2 (n - 1) M, which is also what servers move; or recursive doubling's.

    The MPI library has no 16-bit floats: there they travel as float32, so a cast saves nothing.
    """
    if backend == "mpi" and element_bytes == 2:
        num_bytes *= 2
    if num_bytes <= switch_bytes:
        return num_bytes * messages_of_doubling(num_ranks)
    return 2 * (num_ranks - 1) * num_bytes


def messages_of_doubling(num_ranks: int) -> int:
    """Whole tensors that all ranks send.

    Example:
        >>> [messages_of_doubling(n) for n in (1, 2, 3, 4)]
        [0, 2, 4, 8]
    """
    plans = [plan_doubling(rank, num_ranks) for rank in range(num_ranks)]
    return sum(
        len(plan.partners) + (plan.taker is not None) + (plan.giver is not None) for plan in plans
    )


def gather_bytes(backend: str, payloads: Sequence[int]) -> int:
    """Each payload to n - 1 others; torch's libraries pad it to the longest."""
    others = len(payloads) - 1
    if backend in ("gloo", "nccl", "ddp"):
        return others * len(payloads) * max(payloads)
    return others * sum(payloads)


def merge_bytes(payloads: Sequence[int], answer_bytes: int) -> Bounds:
    """All payloads up but that of the owner's own worker, which may be any; n - 1 answers down."""
    down = (len(payloads) - 1) * answer_bytes
    return sum(payloads) - max(payloads) + down, sum(payloads) - min(payloads) + down


def round_bytes(
    backend: str,
    op: Op,
    given: Sequence[int],
    *,
    answer_bytes: int = 0,
    element_bytes: int = 4,
    switch_bytes: int = 0,
) -> Bounds:
    """One round of any op.

    Args:
        backend: its name; `loopback` sends nothing.
        op: SUM, GATHER, DELIVER or MERGE.
        given: bytes that each rank hands over, parts for itself left out.
        answer_bytes: of a merged payload.
        element_bytes: of the tensors.
        switch_bytes: up to which sums go by recursive doubling.
    """
    if backend == "loopback":
        return 0, 0
    if op is Op.MERGE:
        return merge_bytes(given, answer_bytes)
    if op is Op.ALL_REDUCE:
        moved = sum_bytes(backend, len(given), given[0], element_bytes, switch_bytes)
    else:
        moved = gather_bytes(backend, given) if op is Op.ALL_GATHER else sum(given)
    return moved, moved
