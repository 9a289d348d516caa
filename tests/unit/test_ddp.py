"""`ddp` is PyTorch's DistributedDataParallel as it comes, its sizes of buckets included."""

from __future__ import annotations

import inspect
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import distributed

from testbed.backends.protocol import ExternalFramework, Group
from testbed.backends.torch_groups import DDP
from testbed.backends.torch_groups.ddp_options import (
    BUCKET_MIB,
    FIRST_BUCKET_MIB,
    POWERSGD_START,
)
from testbed.base.axes import BACKENDS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.control.inproc import InprocHub
from testbed.scheduling.bucket import BucketOptions

# Eight tensors of 4.008 MiB, in four layers of 1.002 MiB.
LAYERS, WIDTH = 4, 512
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def buckets_of(**options: object) -> tuple[list[int], bool]:
    """Bytes of each bucket in the order of the first step; whether gradients are views."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    backend = DDP.build(Group(0, 1, InprocHub(1).member(0)), DDP.options(**options))
    assert isinstance(backend, ExternalFramework)
    try:
        wrapped = backend.wrap(model, timeout_s=30.0)
        for _ in range(4):  # the second step rebuilds the buckets, the fourth tells of them
            wrapped(torch.ones(1, WIDTH)).sum().backward()
        told = wrapped._get_ddp_logging_data()
    finally:
        backend.close()
    sizes = [int(size) for size in told["rebuilt_bucket_sizes"].split(",")]
    return sizes, bool(told["gradient_as_bucket_view"])


def test_the_first_bucket_is_torchs():
    sizes, views = buckets_of()
    assert sizes == [LAYER_BYTES, (LAYERS - 1) * LAYER_BYTES]
    assert sizes[0] - LAYER_BYTES < dist._DEFAULT_FIRST_BUCKET_BYTES <= sizes[0]
    assert not views


def test_a_size_of_the_users_is_that_of_every_bucket():
    sizes, views = buckets_of(bucket_mib=2.0, bucket_view=True)
    assert sizes == [2 * LAYER_BYTES, 2 * LAYER_BYTES]
    assert views


def test_predictions_know_torchs_sizes():
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == FIRST_BUCKET_MIB << 20
    assert distributed._DEFAULT_BUCKET_CAP_MB == BUCKET_MIB
    assert BucketOptions() == BucketOptions(BUCKET_MIB, FIRST_BUCKET_MIB)


def test_a_bucket_has_a_size():
    with pytest.raises(UsageError, match="above 0"):
        DDP.options(bucket_mib=0.0)


def test_the_name_that_it_once_had_still_means_it():
    assert str(*BACKENDS.links("peer:ddp")) == "ddp"
    assert str(*BACKENDS.links("peer:ddp,bucket_mib=10")) == "ddp:bucket_mib=10"
    assert BACKENDS.today("peerless:ddp") == "peerless:ddp"


# Hooks and a static graph, on two ranks that are threads of this process.

STEPS = 5
SHAPES = ((32, 64), (64, 48), (48, 8))


def trained(**options: object) -> list[tuple[torch.Tensor, int]]:
    """Of each rank: the parameters after a few steps on its own samples, and bytes sent."""
    hub = InprocHub(2)

    def rank(number: int) -> tuple[torch.Tensor, int]:
        backend = DDP.build(Group(number, 2, hub.member(number)), DDP.options(**options))
        assert isinstance(backend, ExternalFramework)
        generator = torch.Generator().manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(*shape) for shape in SHAPES))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        samples = torch.randn(2, STEPS, 16, SHAPES[0][0], generator=generator)[number]
        try:
            wrapped = backend.wrap(model, timeout_s=30.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in samples:
                optimizer.zero_grad()
                wrapped(batch).square().mean().backward()
                optimizer.step()
                backend.count_step()
            return torch.cat([p.detach().flatten() for p in model.parameters()]), int(
                backend.traffic().sent_bytes
            )
        finally:
            backend.close()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


def test_a_static_graph_trains_the_same():
    assert torch.equal(trained(static_graph=True)[0][0], trained()[0][0])


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_a_hook_that_casts_halves_bytes_and_trains_alike(hook: str):
    (plain, plain_bytes), _ = trained()
    (ours, our_bytes), (theirs, _) = trained(hook=hook)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, plain)
    torch.testing.assert_close(ours, plain, atol=2e-3, rtol=0)
    assert 2 * our_bytes == plain_bytes


def test_powersgd_sends_less_from_its_first_step_on():
    (_, plain_bytes), _ = trained()
    (ours, our_bytes), (theirs, _) = trained(hook="powersgd", start=2, rank=1)
    torch.testing.assert_close(ours, theirs)
    vectors = sum(rows for _, rows in SHAPES)
    factors = sum(columns + rows for columns, rows in SHAPES)
    whole = plain_bytes // STEPS
    assert our_bytes == 2 * whole + (STEPS - 2) * 4 * (vectors + factors)


def test_torchs_default_of_powersgd_is_known():
    state = inspect.signature(PowerSGDState).parameters
    assert state["start_powerSGD_iter"].default == POWERSGD_START == DDP.options().start
    assert state["matrix_approximation_rank"].default == DDP.options().rank


@pytest.mark.parametrize(
    ("options", "config", "why"),
    [
        ("static_graph=1", RunConfig(accumulate=2), "cannot stand beside --accumulate 2"),
        ("hook=powersgd", RunConfig(steps=50), "this run has 50 steps"),
        ("hook=powersgd", RunConfig(), "this run has 100 steps"),
        ("hook=powersgd,start=2", RunConfig(checkpoint="x"), "checkpoints do not reach it"),
    ],
)
def test_what_would_go_wrong_or_do_nothing_is_refused(options: str, config: RunConfig, why: str):
    with pytest.raises(UsageError, match=re.escape(why)):
        BACKENDS.resolve(f"ddp:{options}").check(config)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("rank=2", "options of hook=powersgd"),
        ("hook=powersgd,start=1", "a start of 2 or more"),
        ("hook=topk", "expected one of none, fp16"),
        ("bucket_mib=1,plan=x", "one of them"),
    ],
)
def test_options_that_exclude_each_other(options: str, why: str):
    with pytest.raises(UsageError, match=why):
        BACKENDS.resolve(f"ddp:{options}")


def test_a_hook_is_no_exact_mean():
    assert BACKENDS.resolve("ddp:static_graph=1").facts.exact
    assert not BACKENDS.resolve("ddp:hook=fp16").facts.exact
