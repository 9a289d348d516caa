"""Memory: choosing what becomes of activations, playing it back, and releasing gradients.

    OMP_NUM_THREADS=1 pytest tests/benchmarks/test_bench_memory.py --benchmark-only -s

The bound is ten seconds of a core, in yardsticks, for a budget and at most 200 blocks of ResNet-152
or of a GPT-2 with 48 layers, recorded on fake tensors. The gap is printed.
"""

from functools import cache

import pytest
import torch
from torch import nn

from testbed.memory.planning.laysa import laysa
from testbed.memory.planning.lifetimes import KEEP, Costs
from testbed.memory.planning.simulator import Simulator
from testbed.memory.recording.record import record
from testbed.memory.strategy import KEEP_ALL, Release, Strategy
from testbed.models.resnet import resnet152
from testbed.models.transformer import gpt2_model
from testbed.scheduling.protocol import make_plan
from tests.benchmarks.cells import NUM_RANKS, marks_of
from tests.benchmarks.conftest import describe
from tests.harness.bench_cases import FOUR_BYTES
from tests.harness.benchmarking import FIFO, least, processor_s, slowest, yardsticks
from tests.harness.planned import BALANCED, WIDTHS, trace_of_layers

COSTS = Costs(in_flight=2)
AT_MOST = 300  # yardsticks
STRATEGIES = {"keep": KEEP_ALL, "release": Strategy(release=Release())}


def loss(model, batch):
    samples, wanted = batch
    found = model(samples)
    return nn.functional.cross_entropy(found.reshape(-1, found.shape[-1]), wanted.reshape(-1))


@cache
def resnet():
    batch = (torch.zeros(8, 3, 224, 224), torch.zeros(8, dtype=torch.long))
    return record(resnet152(1000), loss, batch)


@cache
def gpt2(num_layers=48):
    sizes = {
        "vocabulary_size": 1024,
        "max_sequence_length": 256,
        "hidden_size": 256,
        "num_layers": num_layers,
        "num_heads": 4,
    }
    tokens = torch.zeros(2, 256, dtype=torch.long)
    return record(gpt2_model(sizes, dropout=0.1), loss, (tokens, tokens))


@pytest.mark.parametrize("share", [0.7, 0.5])
@pytest.mark.parametrize("model", [resnet, gpt2])
def test_plan_under_a_budget(benchmark, model, share):
    step = model()
    assert len(step.values) > 900
    budget = int(share * Simulator(step).footprint(KEEP * len(step.values)).peak_bytes)
    took_s, plan = benchmark.pedantic(processor_s, (laysa, step, COSTS, budget), rounds=1)
    print(f"\n{model.__name__}: {plan.why}")
    found = yardsticks(took_s)
    describe(
        benchmark,
        "planning of memory",
        budget_bytes=budget,
        values=len(step.values),
        gap=plan.gap,
        yardsticks=found,
    )
    assert plan.peak_bytes <= budget
    assert 100 < len(plan.units) <= 200
    assert 0.0 <= plan.gap < 0.5
    assert found < AT_MOST


@pytest.mark.smoke
@pytest.mark.parametrize("letter", "kro")
def test_one_choice_simulated(benchmark, letter):
    step = gpt2(num_layers=12)
    simulator = Simulator(step)
    describe(benchmark, "simulating memory", values=len(step.values), configuration=letter)
    choice = letter * len(step.values)
    footprint = benchmark.pedantic(simulator.footprint, (choice,), rounds=10, warmup_rounds=1)
    assert footprint.peak_bytes > step.weight_bytes


def releases():
    return [
        pytest.param(backend, name, marks=marks_of(backend, smoke=backend == "mpi-ring"))
        for backend in ("mpi-ring", "gloo")
        for name in STRATEGIES
    ]


@pytest.mark.parametrize(("backend", "strategy"), releases())
def test_releasing(benchmark, clock, ranks, backend, strategy):
    """A step in which gradients stay, or are freed as they leave and used as means arrive."""
    plan = make_plan("wfbp", trace_of_layers(), BALANCED)
    case = ("tests.harness.bench_cases:time_steps", plan, WIDTHS, 30, STRATEGIES[strategy])
    by_rank_s = ranks.run(backend, NUM_RANKS, FIFO, *case)
    describe(
        benchmark,
        f"releasing over {backend}, {NUM_RANKS} ranks",
        ranks=NUM_RANKS,
        num_bytes=FOUR_BYTES * sum(plan.num_elements),
        cross_rank_min_s=least(by_rank_s),
        configuration={"backend": backend, "strategy": strategy, "widths": WIDTHS},
    )
    clock.replay(benchmark, slowest(by_rank_s))
