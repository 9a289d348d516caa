"""Compressors: encoding and decoding; selecting beside the library's own selection, by turns.

    pytest tests/benchmarks/test_bench_compression.py --benchmark-only

All contestants take turns in one run on one core, so the ratios hold on a machine of any speed.
"""

import statistics
import time
from dataclasses import replace

import pytest
import torch

from testbed.compression.lockstep import carry_out, handed_over_bytes
from testbed.compression.protocol import Arrived, Context
from testbed.compression.selection import largest, largest_plainly, sampled
from testbed.compression.sparse import pack_sparse, unpack_sparse
from testbed.profiling.codec import BEHIND_WARM_UP
from tests.benchmarks.conftest import describe
from tests.harness.bench_cases import FOUR_BYTES
from tests.harness.benchmarking import medians_in_turns
from tests.harness.compressors import PLAIN, resolve_compressor

NUM_ELEMENTS = 25_000_000
COUNT = NUM_ELEMENTS // 100
AT_MOST = {"sampled": 0.15, "exact": 0.35}
ROUNDS, WARMUP = 5, 2
WRAPPED = ("ef+topk", "ef+topk-sampled", "ef+gtopk", "ef+oktopk")
SMOKE = ("fp16", "ef+topk", "qsgd", "powersgd")
BOUNDED = (
    *("fp16", "ef+topk", "ef+topk-sampled", "dgc:ratio=0.01", "randomk", "ef-sign", "onebit"),
    *("qsgd", "terngrad", "natural"),
)


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
    seconds = benchmark.pedantic(medians_in_turns, (contestants,), rounds=1)
    ratios = {name: seconds[name] / seconds["library"] for name in AT_MOST}
    describe(benchmark, "bounds of compressors", **ratios)
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
    seconds = benchmark.pedantic(medians_in_turns, (contestants,), rounds=1)
    describe(benchmark, "bounds of compressors", ratio=seconds["plain"] / seconds["fast"])
    assert seconds["fast"] < seconds["plain"]


def stages(spec, num_elements, rounds):
    """Seconds of each exchange of two ranks in which one encodes and decodes, and its bytes.

    Steps behind a warm-up: residuals and bases exist by then.
    """
    compressor, states = resolve_compressor(spec), [{}, {}]
    draw = torch.Generator().manual_seed(1)
    found = []
    for step in range(WARMUP + rounds):
        values = [torch.randn(num_elements, generator=draw) for _ in states]
        context = Context(
            num_workers=len(states),
            step=BEHIND_WARM_UP + step,
            shapes=((1000, num_elements // 1000),),
        )
        talks = [
            compressor.exchange(v, s, replace(context, rank=rank))
            for rank, (v, s) in enumerate(zip(values, states, strict=True))
        ]
        times_s, num_bytes, answers, ended = [], 0, None, []
        while not ended:
            rounds_of, ended = [], []
            for rank, talk in enumerate(talks):
                began_s = time.perf_counter()
                try:
                    rounds_of.append(next(talk) if answers is None else talk.send(answers[rank]))
                except StopIteration as stop:
                    ended.append(stop.value)
                if rank == 0:
                    times_s.append(time.perf_counter() - began_s)
            if not ended:
                num_bytes += handed_over_bytes(rounds_of[0], 0)
                answers = carry_out(rounds_of)
        states = [done.state for done in ended]
        found.append({"encode": sum(times_s[:-1]), "decode": times_s[-1], "bytes": num_bytes})
    return found[WARMUP:]


def compressors():
    return [
        pytest.param(spec, part, marks=[pytest.mark.smoke] * (spec in SMOKE))
        for spec in (*PLAIN, *WRAPPED)
        for part in ("encode", "decode")
    ]


@pytest.mark.parametrize(("spec", "part"), compressors())
def test_encode_and_decode(benchmark, clock, one_core, spec, part):
    num_elements = NUM_ELEMENTS // 25
    taken = stages(spec, num_elements, ROUNDS)
    clock_s = [each[part] for each in taken]
    describe(
        benchmark,
        f"{part}, {num_elements} elements",
        num_bytes=FOUR_BYTES * num_elements,
        sent_bytes=taken[-1]["bytes"],
        algbw_bytes_per_s=FOUR_BYTES * num_elements / statistics.median(clock_s),
        ranks=2,
        configuration={"compressor": spec},
    )
    clock.replay(benchmark, clock_s)


def test_codecs_beside_the_library_s_selection(benchmark, one_core):
    """Encoding and decoding by turns with the selection alone: bounds against blunders."""
    num_elements = NUM_ELEMENTS // 10
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(1))
    context = Context(num_workers=2)
    states = {spec: {} for spec in BOUNDED}

    def one_step(spec):
        talk = resolve_compressor(spec).exchange(values, states[spec], context)
        given = next(talk)
        try:
            talk.send(Arrived(given.parts * (2 if given.merger else 1)))
        except StopIteration as stop:
            states[spec] = stop.value.state

    contestants = {spec: lambda spec=spec: one_step(spec) for spec in BOUNDED}
    contestants["library"] = lambda: torch.topk(values.abs(), num_elements // 100)
    seconds = benchmark.pedantic(medians_in_turns, (contestants,), rounds=1)
    ratios = {spec: seconds[spec] / seconds["library"] for spec in BOUNDED}
    describe(benchmark, "bounds of compressors", **ratios)
    assert ratios["ef+topk"] < 1
    assert ratios["ef+topk-sampled"] < 1
    assert max(ratios.values()) < 10, ratios
