"""The reference's means: sums in rank order, and one worker's gradients at a time."""

from __future__ import annotations

import weakref

import torch

from testbed.base.config import RunConfig
from testbed.base.types import SERVERLESS_OPS, Capabilities
from testbed.training.compressed.spec import compression_of
from testbed.training.reference import CompressedMeans, SummedMeans
from testbed.training.replica import make_replica
from testbed.workloads.load import load_workload
from tests.harness.two_ranks import plan_of


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


def test_compressed_means_leave_alone_what_the_session_would():
    """Later than in the first step only if that has shown unused parameters, as the session."""
    for in_first, expected in ((False, False), (True, True)):
        replica = make_replica(load_workload("digits-mlp", seed=1), RunConfig(), 1)
        parameters = list(replica.model.parameters())
        plans = [plan_of("wfbp", replica.model)] * 2
        compression = compression_of("fp16", 1)
        assert compression is not None
        means = CompressedMeans(compression, Capabilities(SERVERLESS_OPS), 2, plans)
        for step in range(2):
            given: list[torch.Tensor | None] = [torch.ones_like(p) for p in parameters]
            if step == 1 or in_first:
                given[0] = None
            for _ in range(2):
                means.add(list(given))
            means.set(replica, step)
        assert (parameters[0].grad is None) is expected
