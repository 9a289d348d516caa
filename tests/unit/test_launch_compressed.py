"""Predictions of compressed runs: the compressor timed here, its bytes on the fitted link."""

import os
import threading

import msgspec
import pytest

from testbed.backends.protocol import Group
from testbed.control.inproc import InprocHub
from testbed.errors import UsageError
from testbed.launch.compressed import MAX_WORKERS, codec_here, compressed_iteration_s
from testbed.launch.planning import Planned, predicted_step_s
from testbed.prediction.link import Link
from testbed.prediction.trace import Trace, TraceTensor
from testbed.scheduling.protocol import make_plan

# Slow enough that what this machine's compressing takes is lost beside the bytes.
LINK = Link(backend="mpi-ring", num_workers=2, latency_s=1.0, seconds_per_byte=1.0)
TRACE = Trace(
    name="t",
    device="cpu",
    batch_size=1,
    tensors=tuple(
        TraceTensor(name=name, num_elements=50_000, forward_s=1.0, backward_s=1.0) for name in "ab"
    ),
)
PLAN = make_plan("wfbp", TRACE, LINK)


def alone() -> Group:
    return Group(0, 1, InprocHub(1).member(0))


def iteration_s(plan, link, compressor):
    return compressed_iteration_s(plan, TRACE, link, codec_here(plan, link, compressor, alone()))


def test_dense_bytes_halved_take_half_the_time():
    dense_s = predicted_step_s(Planned(PLAN, trace=TRACE, link=LINK), alone())
    halved_s = predicted_step_s(Planned(PLAN, trace=TRACE, link=LINK), alone(), "fp16")
    assert dense_s == pytest.approx(2 + 1 + 2 * (1 + 200_000))
    assert halved_s == pytest.approx(2 + 1 + 2 * (1 + 100_000), rel=1e-4)


def test_a_server_sends_back_what_it_merged():
    """On a ring both gather 1 payload each; a server beside each worker pulls the union of two."""
    spec = "topk:ratio=0.01"
    ring_s = iteration_s(PLAN, LINK, spec)
    served = msgspec.structs.replace(LINK, backend="zmq-ps")
    server_s = iteration_s(PLAN, served, spec)
    # The union of two draws of 1 % is nearly 2 %: m + 2 m instead of m.
    assert 2.5 * ring_s < server_s < 3.1 * ring_s


def test_everything_is_stretched_by_the_dilation():
    plain_s = predicted_step_s(Planned(PLAN, trace=TRACE, link=LINK), alone(), "fp16")
    slow_s = predicted_step_s(Planned(PLAN, trace=TRACE, link=LINK, dilation=10.0), alone(), "fp16")
    assert slow_s == pytest.approx(10 * plain_s, rel=1e-4)


def test_ratios_need_a_compressor_with_one():
    plan = make_plan("lags", TRACE, LINK)
    with pytest.raises(UsageError, match="gives each message a ratio, but 'fp16' has none"):
        iteration_s(plan, LINK, "fp16")


def test_too_many_workers_to_play_are_not_predicted():
    many = msgspec.structs.replace(LINK, num_workers=MAX_WORKERS + 1)
    assert predicted_step_s(Planned(PLAN, trace=TRACE, link=many), alone(), "fp16") is None


def test_all_ranks_agree_on_the_cost_and_on_the_cores_that_they_share():
    hub, num_ranks = InprocHub(2), 2
    found = [None] * num_ranks

    def measure(rank: int) -> None:
        group = Group(rank, num_ranks, hub.member(rank))
        found[rank] = codec_here(PLAN, LINK, "ef+topk:ratio=0.01", group, dilation=10.0)

    ranks = [threading.Thread(target=measure, args=(rank,)) for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert found[0] is not None
    assert found[0] == found[1]
    assert found[0].one_core == (len(os.sched_getaffinity(0)) < 2 * num_ranks)
