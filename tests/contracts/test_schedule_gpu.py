"""Schedulers with GPU tensors: the same parameters, and messages beside the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from testbed.base.link import Link
from testbed.base.trace import Trace, TraceTensor
from testbed.scheduling.protocol import make_plan
from tests.contracts.schedules import SPECS, TRAININGS, plan_of, setup_of
from tests.contracts.session_models import reference
from tests.contracts.specs import SCHEDULED, job_of, most_nccl_ranks
from tests.harness.rank_pool import Job, PoolKeeper

CASES = "tests.contracts.schedule_cases"
# A GPU adds in another order than the CPU that plays the reference.
TOLERANCE = {"float32": 1e-4, "float64": 1e-10}
WIDTH = 4096

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


def gpu_jobs() -> list[Any]:
    """Two ranks of every default backend whose ranks are processes; they may share a GPU."""
    able = [m for m in SCHEDULED if not m.reason and not m.facts.in_process]
    enough = [m for m in able if "cpu" in m.facts.device_types or most_nccl_ranks() > 1]
    jobs = [job_of(m, 2) for m in enough]
    return [
        pytest.param(Job(j.backend, j.num_ranks, j.setup, "cuda"), id=f"{j.backend}-cuda")
        for j in jobs
    ]


every_gpu_job = pytest.mark.parametrize("job", gpu_jobs())


@every_gpu_job
@pytest.mark.parametrize("spec", SPECS)
def test_every_scheduler_trains_as_one_process(job: Job, spec: str, pools: PoolKeeper) -> None:
    for name, training in TRAININGS.items():
        recipe, plan = training.recipe, plan_of(spec, training, job.num_ranks)
        setup = setup_of(plan, job.setup.num_channels)
        ranks = pools.with_setup(job, setup)
        trained = ranks.run(f"{CASES}:by_plan", recipe, plan, training.held_up, setup=setup)
        tolerance = TOLERANCE[recipe.dtype]
        wanted = reference(recipe, job.num_ranks, seed=0)
        for rank in trained:
            assert rank.exchanges == trained[0].exchanges, name
            for ours, theirs in zip(rank.parameters, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@every_gpu_job
def test_messages_travel_beside_the_backward_pass(job: Job, pools: PoolKeeper) -> None:
    """The last layer's exchange begins and ends while the GPU still computes gradients."""
    names = ("0.weight", "2.weight")
    tensors = tuple(
        TraceTensor(name=name, num_elements=WIDTH**2, forward_s=1e-3, backward_s=1e-3)
        for name in names
    )
    trace = Trace(name="busy", device="cuda", batch_size=1, tensors=tensors)
    link = Link(backend="", num_workers=2, latency_s=0.0, seconds_per_byte=0.0)
    plan = make_plan("wfbp", trace, link)
    setup = setup_of(plan, job.setup.num_channels)
    ranks = pools.with_setup(job, setup)
    case = "tests.contracts.timing_cases:overlaps_backward"
    for backward in ranks.run(case, plan, WIDTH, setup=setup):
        last = next(event for event in backward.events if event.key == "2.weight")
        assert backward.began_s < last.started_s
        assert last.ended_s < backward.ended_s
