"""Finds by measuring up to which size recursive doubling is faster than the ring."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from testbed.backends.mpi.channel import RingChannel
from testbed.backends.mpi.doubling_plan import choose_switch
from testbed.backends.mpi.patience import Patience
from testbed.backends.mpi.steps import Steps, complete
from testbed.nouns import Combined, Verb

TRIED_BYTES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
IN_ROW = 6


def measure_switch(channel: RingChannel, patience: Patience, num_repeats: int = 5) -> int:
    """Bytes up to which recursive doubling is the faster one here; some 10 ms in all.

    Rank 0's medians decide for all ranks, which must switch at the same size.
    """
    if channel.comm.Get_size() == 1:
        return 0
    timings = []
    for num_bytes in TRIED_BYTES:
        tensor = torch.zeros(num_bytes // 4)

        def by_doubling(tensor: torch.Tensor = tensor) -> Steps[Combined]:
            return channel.doubling(tensor)

        def by_ring(tensor: torch.Tensor = tensor) -> Steps[Combined]:
            return channel.ring(tensor, Verb.SUM)

        doubling_s, ring_s = _medians_s((by_doubling, by_ring), patience, num_repeats)
        timings.append((num_bytes, doubling_s, ring_s))
    channel.free()  # what was armed points to memory that goes away here
    return int(channel.comm.bcast(choose_switch(timings), root=0))


def _medians_s(
    candidates: Sequence[Callable[[], Steps[Combined]]], patience: Patience, num_repeats: int
) -> list[float]:
    """Median seconds of each candidate, run in turn so that a disturbance meets all of them."""
    samples: list[list[float]] = [[] for _ in candidates]
    for repeat in range(num_repeats + 1):
        for begin, into in zip(candidates, samples, strict=True):
            start_s = time.perf_counter()
            # In a row, as in a training step: what the network has saved up in a pause lets a sum
            # alone look cheaper than it is.
            for _ in range(IN_ROW):
                complete(begin(), patience)
            if repeat > 0:  # the first one arms the requests and touches the memory
                into.append(time.perf_counter() - start_s)
    return [statistics.median(s) for s in samples]
