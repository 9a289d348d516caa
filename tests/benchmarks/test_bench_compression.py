"""Selecting and packing the top 1 % of 25 million elements, beside the library's own selection.

    pytest tests/benchmarks/test_bench_compression.py --benchmark-only

All contestants take turns in one run on one core, so the ratios hold on a machine of any speed.
"""

import statistics
import time

import pytest
import torch

from testbed.compression.protocol import Arrived, Context
from testbed.compression.selection import largest, largest_plainly, sampled
from testbed.compression.sparse import pack_sparse, unpack_sparse
from tests.harness.compressors import resolve_compressor

NUM_ELEMENTS = 25_000_000
COUNT = NUM_ELEMENTS // 100
AT_MOST = {"sampled": 0.15, "exact": 0.35}
ROUNDS = 5
COMPRESSORS = (
    "fp16",
    "ef+topk",
    "ef+topk-sampled",
    "dgc:ratio=0.01",
    "randomk",
    "ef-sign",
    "onebit",
    "qsgd",
    "terngrad",
    "natural",
)


@pytest.fixture
def one_core():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def taken_in_turns(contestants):
    """Median seconds of each, over rounds in which everybody has a turn."""
    times = {name: [] for name in contestants}
    for _ in range(ROUNDS + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def largest_by_library(values):
    indices = torch.topk(values.abs(), COUNT).indices
    return values.gather(0, indices), indices


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed"])
def test_selecting_and_packing(benchmark, one_core, kind):
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(NUM_ELEMENTS, generator=draw)
    if kind == "heavy-tailed":
        values = values**3

    def packed(indices):
        return pack_sparse(indices, values[indices], NUM_ELEMENTS)

    contestants = {
        "library": lambda: largest_by_library(values),
        "exact": lambda: packed(largest(values, COUNT)),
        "sampled": lambda: packed(sampled(values, COUNT, 3)),
    }
    seconds = benchmark.pedantic(taken_in_turns, (contestants,), rounds=1)
    ratios = {name: seconds[name] / seconds["library"] for name in AT_MOST}
    benchmark.extra_info |= {name: round(ratio, 3) for name, ratio in ratios.items()}
    indices = unpack_sparse(contestants["exact"](), values)[0]
    assert torch.equal(indices, largest_by_library(values)[1].sort().values)
    for name, bound in AT_MOST.items():
        assert ratios[name] <= bound, ratios


def test_the_plain_twin_is_what_the_fast_way_replaces(benchmark, one_core):
    values = torch.randn(NUM_ELEMENTS // 10, generator=torch.Generator().manual_seed(1))
    contestants = {
        "plain": lambda: largest_plainly(values, COUNT // 10),
        "fast": lambda: largest(values, COUNT // 10),
    }
    seconds = benchmark.pedantic(taken_in_turns, (contestants,), rounds=1)
    benchmark.extra_info["plain / fast"] = round(seconds["plain"] / seconds["fast"], 1)
    assert seconds["fast"] < seconds["plain"]


def test_encode_and_decode_of_every_kind(benchmark, one_core):
    """Time of each beside the selection alone: a table, and bounds against blunders."""
    num_elements = NUM_ELEMENTS // 10
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(1))
    context = Context(num_workers=2)
    states = {spec: {} for spec in COMPRESSORS}

    def one_step(spec):
        talk = resolve_compressor(spec).exchange(values, states[spec], context)
        given, started = next(talk), time.perf_counter()
        try:
            talk.send(Arrived(given.parts * (2 if given.merger else 1)))
        except StopIteration as stop:
            states[spec] = stop.value.state
        return time.perf_counter() - started

    contestants = {spec: lambda spec=spec: one_step(spec) for spec in COMPRESSORS}
    contestants["library"] = lambda: torch.topk(values.abs(), num_elements // 100)
    seconds = benchmark.pedantic(taken_in_turns, (contestants,), rounds=1)
    ratios = {spec: seconds[spec] / seconds["library"] for spec in COMPRESSORS}
    benchmark.extra_info |= {spec: round(ratio, 2) for spec, ratio in ratios.items()}
    assert ratios["ef+topk"] < 1
    assert ratios["ef+topk-sampled"] < 1
    assert max(ratios.values()) < 10, ratios
