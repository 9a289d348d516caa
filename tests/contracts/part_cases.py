"""Parts from each rank to each, and payloads that a server merges, as cases for all ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.types import Op, Request, Traffic, shard_bounds
from testbed.compression.gathered import Codec, gathered_mean
from testbed.compression.protocol import Context, Merger
from testbed.compression.quantize import Levels, Quantised
from testbed.compression.server_merge import describe, merge
from testbed.compression.sign import Sign
from testbed.compression.sparse_mean import SparseMerger
from testbed.compression.topk import Threshold, TopK
from testbed.training.compressed.driver import arrived_of
from tests.contracts.cases import (
    DTYPES,
    WITHIN_S,
    assert_same,
    device_of,
    integers,
    meet,
    normals,
)

Sizes = list[list[int]]  # [from][to], in elements
PER_CHANNEL = 8
CODECS: dict[str, Codec] = {
    "topk": TopK(0.05),
    "threshold": Threshold(1.5),  # another size on each rank
    "nothing": Threshold(1e9),  # empty payloads
    "dense": Threshold(1e-9),
    "sign": Sign(),
    "qsgd": Quantised(Levels(4, 512, "l2")),
}


def plans(size: int) -> list[Sizes]:
    """Equal sizes, unequal ones, all empty, all but one empty, and one beyond a slice."""
    ranks = range(size)
    return [
        [[7] * size for _ in ranks],
        [[(5 * source + 3 * target) % 4 * 1001 for target in ranks] for source in ranks],
        [[0] * size for _ in ranks],
        [[33 * (source == size - 1 and target == 0) for target in ranks] for source in ranks],
        [[600_001 * (source == 0) + 1 for target in ranks] for source in ranks],
    ]


def part(source: int, target: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    return integers(source, num_elements, dtype, salt=5 * target)


def parts_from(backend: Backend, sizes: Sizes, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    device, rank = device_of(backend), backend.rank
    return tuple(part(rank, t, n, dtype).to(device) for t, n in enumerate(sizes[rank]))


def assert_delivered(
    backend: Backend, arrived: tuple[torch.Tensor, ...], sizes: Sizes, dtype: torch.dtype
) -> None:
    assert len(arrived) == backend.size
    for source, tensor in enumerate(arrived):
        expected = part(source, backend.rank, sizes[source][backend.rank], dtype)
        assert_same(tensor, expected, (source, sizes))


def delivers(backend: Backend, group: Group, dtype_name: str) -> None:
    """Parts of all sizes, and what was given stays as it was."""
    dtype = DTYPES[dtype_name]
    for step, sizes in enumerate(plans(group.size)):
        mine = parts_from(backend, sizes, dtype)
        work = backend.submit(Request(Op.ALL_TO_ALL, parts=mine, key="parts", step=step))
        assert_delivered(backend, work.wait(WITHIN_S).parts, sizes, dtype)
        assert work.event.num_bytes == sum(sizes[group.rank]) * dtype.itemsize
        for target, tensor in enumerate(mine):
            assert_same(tensor, part(group.rank, target, tensor.numel(), dtype), "own")


def delivers_under_way(backend: Backend, group: Group, any_order: bool) -> None:
    """Many keys at once on all channels, between sums; memory is overwritten as each is done."""
    num_channels = backend.capabilities.num_channels
    jobs = []
    for step in range(PER_CHANNEL):
        for turn in range(num_channels):
            channel = (turn + (0 if any_order else group.rank)) % num_channels
            sizes = plans(group.size)[(step + channel) % 4]
            mine = parts_from(backend, sizes, torch.float32)
            key = f"layer {step} of {channel}"
            request = Request(Op.ALL_TO_ALL, parts=mine, key=key, channel=channel, priority=-step)
            jobs.append((request, sizes))
    if any_order:
        generator = torch.Generator().manual_seed(group.rank)
        jobs = [jobs[i] for i in torch.randperm(len(jobs), generator=generator).tolist()]
    works = [(backend.submit(request), request, sizes) for request, sizes in jobs]
    for work, request, sizes in reversed(works):
        arrived = work.wait(WITHIN_S).parts
        for rank, tensor in enumerate(request.parts):
            if rank != group.rank:  # the own part may be handed back as it is
                tensor.fill_(-1)
        assert_delivered(backend, arrived, sizes, torch.float32)


def traffic_of_delivers(backend: Backend, group: Group) -> tuple[Traffic, Traffic, int, int]:
    """What the counters moved by, what the requests say, and bytes of parts for and from others."""
    meet(group, "before delivering")
    before = backend.traffic()
    meet(group, "counted before delivering")
    requests, sent, received = Traffic(), 0, 0
    for step, sizes in enumerate(plans(group.size)):
        mine = parts_from(backend, sizes, torch.float32)
        work = backend.submit(Request(Op.ALL_TO_ALL, parts=mine, key="counted", step=step))
        requests += work.wait(WITHIN_S).traffic
        for other in range(group.size):
            if other != group.rank:
                sent += 4 * sizes[group.rank][other]
                received += 4 * sizes[other][group.rank]
    meet(group, "all is delivered")
    counted = backend.traffic() - before
    meet(group, "counted after delivering")
    return counted, requests, sent, received


def payloads_of(codec: Codec, size: int, num_elements: int) -> tuple[torch.Tensor, ...]:
    context = Context(key="payload")
    return tuple(codec.encode(v, context).payload for v in values_of(size, num_elements))


def values_of(size: int, num_elements: int) -> tuple[torch.Tensor, ...]:
    return tuple(normals(rank, num_elements, torch.float32) for rank in range(size))


def merges(backend: Backend, group: Group, any_order: bool) -> list[int]:
    """Many keys at once on all channels, each as the reference merges it, bit for bit.

    Returns the bytes of the merged payloads.
    """
    num_channels = backend.capabilities.num_channels
    jobs = []
    for number, (name, codec) in enumerate(CODECS.items()):
        for num_elements in (0, 1, 700, 300_001):
            merger: Merger = SparseMerger() if name == "topk" else codec
            payloads = payloads_of(codec, group.size, num_elements)
            like = torch.zeros(num_elements)
            expected, _ = merge(merger, payloads, like, {}, Context())
            note = describe(merger, num_elements, torch.float32)
            request = Request(
                Op.MERGE,
                payloads[group.rank].to(device_of(backend)),
                key=f"{name} {num_elements}",
                note=note,
                channel=number % num_channels,
                priority=num_elements,
            )
            jobs.append((request, expected))
    if any_order:
        generator = torch.Generator().manual_seed(group.rank)
        jobs = [jobs[i] for i in torch.randperm(len(jobs), generator=generator).tolist()]
    works = [(backend.submit(request), request, expected) for request, expected in jobs]
    for work, request, expected in works:
        result = work.wait(WITHIN_S)
        assert result.lossless
        assert result.tensor is not None
        assert_same(result.tensor, expected.payload, request.key)
    return [expected.payload.numel() for _, expected in jobs]


def merges_cut(backend: Backend, group: Group) -> None:
    """Every server merges its range of a message; together that is the merge of the whole."""
    num_mergers = backend.capabilities.num_mergers
    for num_elements in (num_mergers, 700, 300_001):
        like = torch.zeros(num_elements)
        payloads = payloads_of(TopK(0.05), group.size, num_elements)
        bounds = shard_bounds(num_elements, num_mergers)
        notes = [describe(TopK(0.05), b - a, torch.float32) for a, b in pairwise(bounds)]
        mine = TopK(0.05).cut(payloads[group.rank], like, bounds)
        request = Request(
            Op.MERGE,
            key=f"cut {num_elements}",
            note="\n".join(notes),
            parts=tuple(part.to(device_of(backend)) for part in mine),
        )
        answer = arrived_of(Op.MERGE, backend.submit(request).wait(WITHIN_S))
        assert len(answer.pieces) == num_mergers
        talk = gathered_mean(TopK(0.05), payloads[group.rank], like)
        next(talk)
        with pytest.raises(StopIteration) as stop:
            talk.send(answer)
        assert_same(stop.value.value, TopK(0.05).combine(payloads, like), request.key)


def traffic_of_merges(backend: Backend, group: Group) -> tuple[Traffic, list[int], int]:
    """What the counters moved by in one merge, the bytes that ranks pushed, and those pulled."""
    codec, num_elements = Threshold(1.0), 100_000
    payloads = payloads_of(codec, group.size, num_elements)
    meet(group, "before merging")
    before = backend.traffic()
    meet(group, "counted before merging")
    note = describe(codec, num_elements, torch.float32)
    mine = payloads[group.rank].to(device_of(backend))
    merged = backend.submit(Request(Op.MERGE, mine, key="counted", note=note)).wait(WITHIN_S)
    meet(group, "all is merged")
    counted = backend.traffic() - before
    meet(group, "counted after merging")
    assert merged.tensor is not None
    return counted, [p.numel() for p in payloads], merged.tensor.numel()
