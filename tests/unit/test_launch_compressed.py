"""Predictions of compressed runs: the compressor timed here, its bytes on the fitted link."""

import os
import threading

import msgspec
import pytest

from testbed.backends.protocol import Group
from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.base.trace import Trace, TraceTensor
from testbed.control.inproc import InprocHub
from testbed.launch.codec_cost import (
    MAX_PLAYED,
    codec_here,
    compressed_iteration_s,
    compressed_plan,
)
from testbed.launch.planning import Planned, predicted_step_s
from testbed.scheduling.protocol import make_plan
from testbed.scheduling.under_compressor import overlapped

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


def here(compressor, link=LINK, dilation=1.0):
    return codec_here(compressor, link, 100_000, alone(), dilation)


def iteration_s(plan, link, compressor):
    return compressed_iteration_s(plan, TRACE, link, here(compressor, link))


def step_s(compressor, dilation=1.0):
    codec = here(compressor, dilation=dilation)
    planned = Planned(PLAN, trace=TRACE, link=LINK, dilation=dilation, codec=codec)
    return predicted_step_s(planned, compressor)


def test_dense_bytes_halved_take_half_the_time():
    dense_s = predicted_step_s(Planned(PLAN, trace=TRACE, link=LINK))
    halved_s = step_s("fp16")
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
    plain_s = step_s("fp16")
    slow_s = step_s("fp16", dilation=10.0)
    assert slow_s == pytest.approx(10 * plain_s, rel=1e-4)


def test_compressing_is_faster_in_the_time_of_a_slowed_cluster():
    (sample,) = here("ef+topk:ratio=0.01", dilation=1e9).codec.samples[-1:]
    assert 0 < sample.compute_s[0] < 1e-6  # would be a quarter of an hour, undivided


def test_ratios_need_a_compressor_with_one():
    plan = make_plan("lags", TRACE, LINK)
    with pytest.raises(UsageError, match="gives each message a ratio, but 'fp16' has none"):
        iteration_s(plan, LINK, "fp16")


def test_too_many_workers_to_play_are_not_predicted():
    many = msgspec.structs.replace(LINK, num_workers=MAX_PLAYED + 1)
    assert here("fp16", many) is None
    assert predicted_step_s(Planned(PLAN, trace=TRACE, link=many), "fp16") is None


def test_all_ranks_agree_on_the_cost_and_on_the_cores_that_they_share():
    hub, num_ranks = InprocHub(2), 2
    found = [None] * num_ranks

    def measure(rank: int) -> None:
        group = Group(rank, num_ranks, hub.member(rank))
        found[rank] = codec_here("ef+topk:ratio=0.01", LINK, 100_000, group, dilation=10.0)

    ranks = [threading.Thread(target=measure, args=(rank,)) for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert found[0] is not None
    assert found[0] == found[1]
    assert found[0].one_core == (len(os.sched_getaffinity(0)) < 2 * num_ranks)


def test_schedulers_plan_with_what_compressed_messages_take():
    seen = []

    def make(link):
        seen.append(link)
        return make_plan("mg-wfbp", TRACE, link)

    compressed_plan(make, TRACE, LINK, here("fp16"), 1)
    assert seen[0] == LINK
    assert seen[1].latency_s == pytest.approx(1.0 + 2 * 1.0, rel=0.1)  # of one element's bytes
    assert seen[1].seconds_per_byte == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("dense", "compressed", "taken"),
    [("sequential", "wfbp", "wfbp"), ("wfbp", "sequential", "wfbp")],
)
def test_the_plan_that_is_predicted_to_be_faster_is_taken(dense, compressed, taken):
    """Compressed to bytes that take as long as a layer, two messages overlap and one does not."""
    plans = [make_plan(dense, TRACE, LINK), make_plan(compressed, TRACE, LINK)]
    link = msgspec.structs.replace(LINK, latency_s=0.0, seconds_per_byte=1e-5)
    made = iter(plans)
    plan = compressed_plan(lambda seen: next(made), TRACE, link, here("fp16", link), 1)
    assert plan.scheduler == taken
    assert ("planned for fp16" in plan.reason) == (taken == compressed)


def test_schedulers_that_know_of_sparse_messages_get_the_link_as_it_is():
    spec = "ef+topk:ratio=0.01"
    plan = compressed_plan(lambda link: make_plan("lags", TRACE, link), TRACE, LINK, here(spec), 8)
    assert plan == make_plan("lags", TRACE, LINK)


def test_compressed_messages_travel_by_turns_on_several_channels():
    plan, again = overlapped(PLAN, lambda names: make_plan("sequential", TRACE, LINK), 8)
    assert again(()).num_channels == 2  # as many as the backend was opened for
    assert plan.num_channels == 2
    assert [message.channel for message in plan.messages] == [0, 1]
    assert [m.parts for m in plan.messages] == [m.parts for m in PLAN.messages]


@pytest.mark.parametrize("scheduler", ["p3", "asc-wfbp"])
def test_plans_with_an_order_or_channels_of_their_own_stay(scheduler):
    plan = make_plan(scheduler, TRACE, LINK)
    assert plan.order == "priority" or plan.num_channels > 1
    assert overlapped(plan, None, 8) == (plan, None)
