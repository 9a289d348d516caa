"""Which exchanges are benchmarked: a covering choice of backend, verb, size and ranks."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.base.axes import BACKENDS as REGISTERED
from testbed.launch.join import who_am_i
from testbed.microbench.contestants import comparable
from tests.harness.bench_cases import VERBS

IDENTITY = who_am_i()
LAUNCHED = IDENTITY.launcher != "alone"
NUM_RANKS = IDENTITY.size if LAUNCHED else 2  # where one number is enough
KIB, MIB = 1 << 10, 1 << 20
# Under a launcher all processes are workers: there are none for dedicated servers.
BACKENDS = (*comparable(), *(() if LAUNCHED else ("zmq-ps:servers=dedicated:1",)))
SUMS = {2: (4 * KIB, 256 * KIB, 4 * MIB, 32 * MIB), 3: (256 * KIB,), 4: (256 * KIB, 4 * MIB)}
OTHERS = {2: (256 * KIB, 4 * MIB), 3: (), 4: (256 * KIB,)}
SMOKE = {("all-reduce", 256 * KIB), ("all-gather", 256 * KIB), ("barrier", 0)}


def exchanges() -> list[Any]:
    """One parameter for each: backend, ranks, verb, bytes; those of one job follow each other."""
    counts = {IDENTITY.size: 2} if LAUNCHED else {2: 2, 3: 3, 4: 4}
    return [
        pytest.param(
            *(backend, num_ranks, verb, num_bytes),
            marks=marks_of(backend, smoke=like == 2 and (verb, num_bytes) in SMOKE),
            id=f"{backend}-{num_ranks}-{verb}-{num_bytes}",
        )
        for backend in BACKENDS
        for num_ranks, like in counts.items()
        for verb in VERBS
        for num_bytes in sizes_of(verb, like)
    ]


def sizes_of(verb: str, num_ranks: int) -> tuple[int, ...]:
    """Bytes; a barrier has none, and one is enough of it."""
    if verb == "barrier":
        return (0,)
    return SUMS[num_ranks] if verb == "all-reduce" else OTHERS[num_ranks]


def marks_of(backend: str, *, smoke: bool) -> list[Any]:
    """Marks of a benchmark with ranks."""
    needs_mpi = REGISTERED.resolve(backend).facts.needs_mpi
    return [pytest.mark.mpi] * needs_mpi + [pytest.mark.smoke] * smoke
