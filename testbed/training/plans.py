"""Plans for a model at hand: from a scheduler's name and the order in which gradients come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from testbed.prediction.link import Link
from testbed.prediction.trace import Trace, TraceTensor
from testbed.scheduling.plan import Plan
from testbed.scheduling.protocol import make_plan

Replan = Callable[[Sequence[str]], Plan]


def skeleton_trace(named: Sequence[tuple[str, torch.Tensor]]) -> Trace:
    """Sizes without times: all that a scheduler without a profile looks at.

    Args:
        named: parameters in forward order.
    """
    tensors = tuple(
        TraceTensor(
            name=name,
            num_elements=tensor.numel(),
            dtype=str(tensor.dtype).removeprefix("torch."),
            forward_s=0.0,
            backward_s=0.0,
        )
        for name, tensor in named
    )
    return Trace(name="sizes", device="", batch_size=1, tensors=tensors)


def replanner(scheduler: str, named: Sequence[tuple[str, torch.Tensor]]) -> Replan:
    """A function from the order in which gradients became ready to the scheduler's plan."""
    tensors = dict(named)
    link = Link(backend="", num_workers=2, latency_s=0.0, seconds_per_byte=0.0)

    def replan(ready_order: Sequence[str]) -> Plan:
        forward = [(name, tensors[name]) for name in reversed(ready_order)]
        return make_plan(scheduler, skeleton_trace(forward), link)

    return replan
