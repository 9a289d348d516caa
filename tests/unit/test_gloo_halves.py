"""The halves of Gloo's ring, over real process groups of threads: the bits of the plain rule."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as untyped_dist

from testbed.backends.torch_groups.backend import (
    MIN_PIECE_BYTES,
    NUM_PIECES,
    ring_fold,
    ring_spread,
)

dist: Any = untyped_dist

WHOLE = NUM_PIECES * MIN_PIECE_BYTES // 4  # elements of a shard that goes in all pieces


@pytest.fixture(params=[2, 3, 4, 5])
def groups(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    store, size = dist.HashStore(), request.param

    def open_one(rank: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        return dist.ProcessGroupGloo(store, rank, size, options)

    with ThreadPoolExecutor(size) as threads:
        opened = list(threads.map(open_one, range(size)))
    yield opened
    opened.clear()  # their sockets and threads end with them


def of_all(groups: list[Any], act: Any, tensors: list[torch.Tensor]) -> list[Any]:
    def one(rank: int) -> Any:
        return act(groups[rank], rank, len(groups), tensors[rank])

    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(one, range(len(groups))))


@pytest.mark.parametrize("num_elements", [1, 3, WHOLE - 1, WHOLE, WHOLE + 1, 3 * WHOLE])
def test_fold_adds_in_the_order_of_the_ring_and_spread_brings_it_to_all(
    groups: list[Any], num_elements: int
) -> None:
    size = len(groups)
    given = [
        torch.randn(size, num_elements, generator=torch.Generator().manual_seed(r))
        for r in range(size)
    ]
    expected = []
    for shard in range(size):  # it sets out at the rank behind its own, and ends at its own
        total = given[(shard + 1) % size][shard]
        for hop in range(2, size + 1):
            total = given[(shard + hop) % size][shard] + total
        expected.append(total)
    for _ in range(3):  # again, with what the last one left in the same memory of the library
        tensors = [each.clone().view(-1) for each in given]
        folded = of_all(groups, ring_fold, tensors)
        assert all(torch.equal(found, total) for found, total in zip(folded, expected, strict=True))
        of_all(groups, ring_spread, tensors)
        assert all(torch.equal(each, torch.cat(expected)) for each in tensors)
