"""Traces and links that benchmarks of planning, simulating and executing share."""

from __future__ import annotations

import random
from functools import cache

from testbed.base.files import load_shipped_trace
from testbed.base.link import Link
from testbed.base.trace import Trace, TraceTensor
from testbed.commands.simulate import scheduler_specs
from tests.harness.bench_cases import layers

ALL = scheduler_specs("all")
WIDTHS = (256, 512, 512, 512, 512, 10)  # of the model that is trained for each scheduler
LINKS = {
    "10GbE": Link(backend="x", num_workers=16, latency_s=9.08e-4, seconds_per_byte=7.4e-10),
    "InfiniBand": Link(backend="x", num_workers=16, latency_s=2.36e-4, seconds_per_byte=4.06e-10),
    "low latency": Link(backend="x", num_workers=16, latency_s=1e-6, seconds_per_byte=4.06e-10),
}
BALANCED = LINKS["InfiniBand"]


@cache
def trace_named(name: str) -> Trace:
    """A shipped trace, or a made-up one of so many tensors: `400`, `4000`."""
    return log_normal(int(name)) if name.isdigit() else load_shipped_trace(name)


def log_normal(
    num_tensors: int,
    num_elements: float = 1e8,
    backward_s: float = 0.2,
    forward_s: float = 0.1,
) -> Trace:
    """Log-normal sizes and even times, as in large convolutional models."""
    draw = random.Random(1)
    sizes = [draw.lognormvariate(0, 2) for _ in range(num_tensors)]
    scale = num_elements / sum(sizes)
    tensors = tuple(
        TraceTensor(
            name=f"t{index}",
            num_elements=max(1, round(size * scale)),
            forward_s=forward_s / num_tensors,
            backward_s=2 * draw.random() * backward_s / num_tensors,
        )
        for index, size in enumerate(sizes)
    )
    return Trace(name="large", device="cpu", batch_size=1, tensors=tensors)


def tiny(num_tensors: int) -> Trace:
    """Nothing but start-ups: nearly all tensors wait at once, and bounds leave most in doubt."""
    tensors = tuple(
        TraceTensor(
            name=f"t{index}",
            num_elements=64,
            forward_s=0.1 / num_tensors,
            backward_s=0.2 / num_tensors,
        )
        for index in range(num_tensors)
    )
    return Trace(name="tiny", device="cpu", batch_size=1, tensors=tensors)


@cache
def trace_of_layers() -> Trace:
    """The model of `bench_cases.layers(WIDTHS)`, each tensor a fifth of a millisecond."""
    tensors = tuple(
        TraceTensor(name=name, num_elements=p.numel(), forward_s=1e-4, backward_s=2e-4)
        for name, p in layers(WIDTHS).named_parameters()
    )
    return Trace(name="layers", device="cpu", batch_size=16, tensors=tensors)
