"""Under mpirun with one rank: what is refused, and what is kept between requests."""

from __future__ import annotations

import pytest
import torch
from launched import MpiControl, open_backend
from mpi4py import MPI

from testbed.backends.mpi.ring import PersistentCache
from testbed.base.errors import UsageError
from testbed.base.types import Op, Request


class Pair:
    """Two persistent requests from a rank to itself."""

    def __init__(self) -> None:
        self.requests = [MPI.COMM_SELF.Send_init(bytearray(4), 0) for _ in range(2)]


def check_refusals(control: MpiControl) -> None:
    backend = open_backend("mpi-ring", control)
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
            backend.submit(request)
    backend.close()
    with pytest.raises(UsageError, match="closed"):
        backend.submit(Request(Op.BARRIER))
    with pytest.raises(UsageError, match="blocking=1"):
        open_backend("mpi:blocking=1", control, num_channels=2)


def check_cache_bound() -> None:
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


def main() -> None:
    control = MpiControl()
    check_refusals(control)
    check_cache_bound()
    print("all right on 1", flush=True)


if __name__ == "__main__":
    main()
