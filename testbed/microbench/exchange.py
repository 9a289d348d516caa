"""One exchange of each operation: what is submitted, what is waited for, what must have come."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from testbed.backends.protocol import Backend
from testbed.microbench import payload
from testbed.microbench.config import VERBS
from testbed.nouns import Combined, Request, Verb
from testbed.records.comm import CommConfig, Operation

ROOT = 0


@dataclass(frozen=True)
class Tensors:
    """What one rank needs for exchanges of any size up to the largest.

    Attributes:
        buffer: [largest count] elements; every backend exchanges in this same memory, so that
            caches and pages treat all alike.
        mine: [PERIOD], this rank's pattern.
        expected: patterns of the result: one, or for a gather one per rank.
    """

    buffer: torch.Tensor
    mine: torch.Tensor
    expected: tuple[torch.Tensor, ...]


def make_tensors(config: CommConfig, rank: int, largest_count: int, device: str) -> Tensors:
    """Allocate and touch the buffer, and find the expected patterns.

    Args:
        config: operation, dtype and workers.
        rank: this rank.
        largest_count: elements of the largest exchange.
        device: `cpu` or `cuda:<index>`.
    """
    dtype = getattr(torch, config.dtype)

    def placed(pattern: torch.Tensor) -> torch.Tensor:
        return pattern.to(device=device, dtype=dtype)

    def of_rank(rank: int) -> torch.Tensor:
        return placed(payload.rank_pattern(rank, config.dtype, config.workers))

    if config.op == "gather":
        expected = tuple(of_rank(r) for r in range(config.workers))
    elif config.op == "broadcast":
        expected = (of_rank(ROOT),)
    else:
        expected = (placed(payload.sum_pattern(config.dtype, config.workers)),)
    return Tensors(torch.zeros(largest_count, dtype=dtype, device=device), of_rank(rank), expected)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One exchange as this rank saw it: its seconds and what came."""

    time_s: float
    result: Combined


def run_exchange(
    backend: Backend, operation: Operation, tensor: torch.Tensor, step: int, name: str
) -> Exchanged:
    """Meet the other ranks at the backend's own barrier, then exchange and time it.

    The time runs from just before `submit` to the return of `wait` (on a GPU: until the result is
    there); the barrier is not in it. It is the backend's own, because the control plane should not
    speak beside the exchanges.

    Args:
        backend: opened.
        operation: what to do.
        tensor: flat; holds this rank's elements, then the result (gather: unchanged).
        step: number of the exchange, equal on all ranks.
        name: of the backend, for errors; equal on all ranks.

    Raises:
        RankLost, DeadlineExceeded: as `Work.wait`.
    """
    key = f"{name}/{tensor.numel()}"
    backend.submit(Request(Verb.BARRIER, key=f"{key}/begin", step=step)).wait()
    result = Combined(tensor)
    start_s = time.perf_counter()
    for verb in VERBS[operation]:
        result = backend.submit(Request(verb, tensor, key=key, step=step, root=ROOT)).wait()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)  # a result may still be on its way to the device
    return Exchanged(time.perf_counter() - start_s, result)


def wrong_elements(
    operation: Operation, tensors: Tensors, tensor: torch.Tensor, result: Combined, step: int
) -> int:
    """How many elements of the result differ from what must have come; a missing one counts."""
    if operation != "gather":
        return payload.num_wrong(tensor, tensors.expected[0], step)
    total = 0
    for rank, pattern in enumerate(tensors.expected):
        part = result.parts[rank] if rank < len(result.parts) else tensor[:0]
        if part.numel() == tensor.numel():
            total += payload.num_wrong(part.view(-1), pattern, step)
        else:
            total += max(tensor.numel(), part.numel())
    return total
