"""`ddp` is PyTorch's DistributedDataParallel as it comes, its sizes of buckets included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import distributed

from testbed.backends.protocol import ExternalFramework, Group
from testbed.backends.torch_groups import BUCKET_MIB, DDP, FIRST_BUCKET_MIB
from testbed.base.axes import BACKENDS
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
