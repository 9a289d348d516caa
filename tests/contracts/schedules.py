"""The schedulers that the contract is held to, and plans for small models on made-up links."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from testbed.base.axes import SCHEDULERS
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace, TraceTensor
from testbed.scheduling.protocol import make_plan
from tests.contracts.session_models import Recipe, build
from tests.harness.rank_agent import Setup

# Options under which a model of 200 KB is cut and fused as a large one is by default.
SMALL = {
    "bucket": "bucket:mib=0.02,first_mib=0.005",
    "cycle": "cycle:mib=0.02",
    "asc-wfbp": "asc-wfbp:channels=3",
    "pace": "pace:segment_kib=8",
    "bytescheduler": "bytescheduler:partition_kib=8,credit_kib=32",
    "p3": "p3:slice_elements=1500",
    "dear": "dear:mib=0.02",
}
SPECS = tuple(SMALL.get(name, name) for name in SCHEDULERS)

# Start-up time in seconds and seconds per byte, where a layer computes for a millisecond.
LINKS = {
    "compute-bound": (1e-6, 1e-12),
    "start-up-bound": (5e-3, 1e-12),
    "bandwidth-bound": (2e-4, 1e-6),
}


@dataclass(frozen=True)
class Training:
    """A recipe, the link that its plan is made for, and whether ranks are held up at random."""

    recipe: Recipe
    link: str
    held_up: bool = False


AWKWARD = Recipe("awkward", accumulate=2, twin=False, steps=5)
COMPLETE = Recipe("complete", accumulate=2, decay=0.9, steps=4)
TRAININGS = {
    "all at once": Training(AWKWARD, "bandwidth-bound"),
    "naive twin": Training(COMPLETE, "start-up-bound"),
    "adam": Training(
        Recipe("awkward", "float64", twin=False, optimizer="adam", decay=0.8, steps=4),
        "compute-bound",
    ),
    "clipped": Training(Recipe("complete", max_norm=0.5, steps=3), "bandwidth-bound"),
    # In the first step all is used, so that nobody expects what comes in the second.
    "unused later": Training(Recipe("unused at times", steps=5), "start-up-bound"),
    "held up": Training(Recipe("awkward", twin=False, steps=4), "bandwidth-bound", held_up=True),
}
# A server that runs the optimizer refuses unused parameters, and has no gradients to clip.
ON_SERVERS = {
    "naive twin": Training(COMPLETE, "start-up-bound"),
    "adam": Training(
        Recipe("complete", "float64", optimizer="adam", decay=0.8, steps=4), "compute-bound"
    ),
    "held up": Training(Recipe("complete", steps=4), "bandwidth-bound", held_up=True),
}


@functools.cache
def trace_of(recipe: Recipe) -> Trace:
    """The recipe's model; every layer takes a millisecond backward and half of that forward."""
    tensors = tuple(
        TraceTensor(
            name=name,
            num_elements=parameter.numel(),
            dtype=recipe.dtype,
            forward_s=0.5e-3,
            backward_s=1e-3,
        )
        for name, parameter in build(recipe, seed=0).named_parameters()
    )
    return Trace(name=recipe.variant, device="cpu", batch_size=4, tensors=tensors)


def link_of(name: str, num_workers: int) -> Link:
    latency_s, seconds_per_byte = LINKS[name]
    return Link(
        backend="mpi-ring",
        num_workers=num_workers,
        latency_s=latency_s,
        seconds_per_byte=seconds_per_byte,
        concurrency_slowdown=(1.0, 1.2, 1.5),
    )


def plan_of(spec: str, training: Training, num_workers: int) -> Plan:
    return make_plan(spec, trace_of(training.recipe), link_of(training.link, num_workers))


def setup_of(plan: Plan, max_channels: int) -> Setup:
    """How the plan wants its backend opened; plans that differ in nothing else share one."""
    if plan.order == "fifo":
        return Setup("fifo", max(plan.num_channels, max_channels))
    return Setup(plan.order, plan.num_channels, plan.credit_bytes)
