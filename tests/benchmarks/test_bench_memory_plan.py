"""How long it takes to choose what becomes of the activations of a large model.

    OMP_NUM_THREADS=1 pytest tests/benchmarks/test_bench_memory_plan.py --benchmark-only -s

The bound is that promised for one core: ten seconds under a budget, for at most 200 blocks of
ResNet-152 or of a GPT-2 with 48 layers, recorded on fake tensors. The gap is printed.
"""

import pytest
import torch
from torch import nn

from testbed.memory.planning.laysa import laysa
from testbed.memory.planning.lifetimes import KEEP, Costs
from testbed.memory.planning.simulator import Simulator
from testbed.memory.recording.record import record
from testbed.models.resnet import resnet152
from testbed.models.transformer import gpt2_model

COSTS = Costs(in_flight=2)


def loss(model, batch):
    samples, wanted = batch
    found = model(samples)
    return nn.functional.cross_entropy(found.reshape(-1, found.shape[-1]), wanted.reshape(-1))


def resnet():
    batch = (torch.zeros(8, 3, 224, 224), torch.zeros(8, dtype=torch.long))
    return record(resnet152(1000), loss, batch)


def gpt2():
    sizes = {
        "vocabulary_size": 1024,
        "max_sequence_length": 256,
        "hidden_size": 256,
        "num_layers": 48,
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
    plan = benchmark.pedantic(laysa, (step, COSTS, budget), rounds=1)
    print(f"\n{model.__name__}: {plan.why}")
    assert plan.peak_bytes <= budget
    assert 100 < len(plan.units) <= 200
    assert 0.0 <= plan.gap < 0.5
    assert benchmark.stats.stats.median < 10.0


@pytest.mark.parametrize("letter", "kro")
def test_one_choice_simulated(benchmark, letter):
    step = gpt2()
    simulator = Simulator(step)
    footprint = benchmark(simulator.footprint, letter * len(step.values))
    assert footprint.peak_bytes > step.weight_bytes
