"""The reference's means: sums in rank order, and one worker's gradients at a time."""

from __future__ import annotations

import weakref

import torch

from testbed.base.config import RunConfig
from testbed.training.reference import SummedMeans
from testbed.training.replica import make_replica
from testbed.workloads.load import load_workload


def test_means_are_sums_in_rank_order_and_hold_no_worker_gradients():
    replica = make_replica(load_workload("digits-mlp", seed=1), RunConfig(), 1)
    parameters = list(replica.model.parameters())
    means, generator = SummedMeans(), torch.Generator().manual_seed(3)
    for step in range(2):
        sums = [torch.zeros_like(p) for p in parameters]
        for rank in range(3):
            given = [torch.randn(p.shape, generator=generator) for p in parameters]
            unused = [rank == 1 or number == 0 for number in range(len(given))]
            means.add([None if no else g for g, no in zip(given, unused, strict=True)])
            for total, gradient, no in zip(sums, given, unused, strict=True):
                if not no:
                    total += gradient
            left = [weakref.ref(g) for g in given]
            del given, gradient
            assert all(r() is None for r in left)
        means.set(replica, step)
        assert parameters[0].grad is None
        for parameter, total in zip(parameters[1:], sums[1:], strict=True):
            assert torch.equal(parameter.grad, total / 3)
