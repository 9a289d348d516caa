"""`ddp` is PyTorch's DistributedDataParallel as it comes, its sizes of buckets included."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import distributed

from testbed.backends.protocol import ExternalFramework, Group
from testbed.backends.torch_groups import DDP
from testbed.backends.torch_groups.ddp import DdpBackend
from testbed.backends.torch_groups.ddp_options import (
    BUCKET_MIB,
    FIRST_BUCKET_MIB,
    POWERSGD_START,
)
from testbed.base.axes import BACKENDS
from testbed.base.config import RunConfig
from testbed.base.errors import Unavailable, UsageError
from testbed.control.inproc import InprocHub
from testbed.scheduling.bucket import BucketOptions
from testbed.training import external_session
from testbed.training.external_session import ExternalSession
from tests.harness.ddp_ranks import SHAPES, STEPS, Trained

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


# Hooks and a static graph, on two ranks.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What two ranks trained with each setting; torch keeps the last one's connections open."""
    results = tmp_path_factory.mktemp("ddp") / "trained.pt"
    subprocess.run(
        [sys.executable, "-m", "tests.harness.ddp_ranks", str(results)], check=True, timeout=100
    )
    found: Trained = torch.load(results)
    return found


def test_a_static_graph_trains_the_same(trained: Trained):
    assert torch.equal(trained["static_graph"][0][0], trained["plain"][0][0])


def test_parameters_that_no_step_uses_are_right_under_a_static_graph(trained: Trained):
    mean = (1 + 2) / 2  # of the ranks' inputs
    assert trained["never b, True"] == [[16 * mean, 4.0, None, None]] * 2


@pytest.mark.parametrize("case", ["never b, False", "at last, False", "at last, True"])
def test_a_parameter_that_a_step_does_not_use_is_an_error_in_that_step(case: str, trained: Trained):
    """Torch tells in the next forward pass, after an update with gradients of one rank alone."""
    step = 0 if case.startswith("never") else 2
    for told in trained[case]:
        assert f"b.weight, b.bias got no gradient in step {step}" in told
        assert "use a backend that carries out plans" in told


def test_a_hook_that_casts_halves_bytes_and_trains_alike(trained: Trained):
    (plain, plain_bytes), _ = trained["plain"]
    (ours, our_bytes), (theirs, _) = trained["fp16"]
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, plain)
    torch.testing.assert_close(ours, plain, atol=2e-3, rtol=0)
    assert 2 * our_bytes == plain_bytes


def test_powersgd_sends_less_from_its_first_step_on(trained: Trained):
    (_, plain_bytes), _ = trained["plain"]
    (ours, our_bytes), (theirs, _) = trained["powersgd"]
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
        ("over=nccl", RunConfig(), "--device is cpu; expected --device cuda"),
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


def test_over_nccl_it_is_compared_with_nccl():
    over_nccl, plain = (BACKENDS.resolve(f"ddp{text}").facts for text in (":over=nccl", ""))
    assert (over_nccl.transport, plain.transport) == ("NCCL", "Gloo")
    assert (over_nccl.device_types, plain.device_types) == ({"cuda"}, {"cpu"})
    assert BACKENDS.resolve("ddp:over=nccl").check(RunConfig(device="cuda")) is None


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_says_what_to_install():
    with pytest.raises(Unavailable, match=r"without NCCL.*install a CUDA build of torch"):
        DDP.build(Group(0, 1, InprocHub(1).member(0)), DDP.options(over="nccl"))


# Where a GPU waits for the exchange, nothing raises.


class OnDevice(DdpBackend):
    """A framework whose exchanges only the device waits for."""

    raises_late = False


@pytest.mark.parametrize("of_buffers", [False, True])
def test_an_exchange_that_only_the_device_waits_for_is_watched(
    of_buffers: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(external_session, "AGREE_S", 0.05)
    hub, lost = InprocHub(2), threading.Event()
    control, framework = hub.member(0), OnDevice(Group(0, 1, InprocHub(1).member(0)), DDP.options())
    hub.member(1).on_loss(lambda loss: lost.set())
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ExternalSession(model, optimizer, framework, control, patience_s=0.05) as session:
        for _ in range(3):  # what ends in time is not late
            session.model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            session.end_step(flush=False)
        assert not lost.wait(3 * external_session.LOOK_EVERY_S)
        if of_buffers:  # a forward pass that another rank holds up
            session.model(torch.ones(1, 2))
        else:
            session.model(torch.ones(1, 2)).sum().backward()
        assert lost.wait(20)
    assert control.loss is not None
    assert "exchange of gradients in step 3 stood still for" in control.loss.why
    framework.close()


def test_a_hook_is_no_exact_mean():
    assert BACKENDS.resolve("ddp:static_graph=1").facts.exact
    assert not BACKENDS.resolve("ddp:hook=fp16").facts.exact
