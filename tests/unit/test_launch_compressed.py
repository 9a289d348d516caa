"""Predictions of compressed runs: the compressor timed here, its bytes on the fitted link."""

import msgspec
import pytest

from testbed.errors import UsageError
from testbed.launch.compressed import MAX_WORKERS, compressed_iteration_s
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


def test_dense_bytes_halved_take_half_the_time():
    dense_s = predicted_step_s(Planned(PLAN, trace=TRACE, link=LINK))
    halved_s = predicted_step_s(Planned(PLAN, trace=TRACE, link=LINK), "fp16")
    assert dense_s == pytest.approx(2 + 1 + 2 * (1 + 200_000))
    assert halved_s == pytest.approx(2 + 1 + 2 * (1 + 100_000), rel=1e-4)


def test_a_server_sends_back_what_it_merged():
    """On a ring both gather 1 payload each; a server beside each worker pulls the union of two."""
    spec = "topk:ratio=0.01"
    ring_s = compressed_iteration_s(PLAN, TRACE, LINK, spec)
    served = msgspec.structs.replace(LINK, backend="zmq-ps")
    server_s = compressed_iteration_s(PLAN, TRACE, served, spec)
    # The union of two draws of 1 % is nearly 2 %: m + 2 m instead of m.
    assert 2.5 * ring_s < server_s < 3.1 * ring_s


def test_everything_is_stretched_by_the_dilation():
    plain_s = predicted_step_s(Planned(PLAN, trace=TRACE, link=LINK), "fp16")
    slow_s = predicted_step_s(Planned(PLAN, trace=TRACE, link=LINK, dilation=10.0), "fp16")
    assert slow_s == pytest.approx(10 * plain_s, rel=1e-4)


def test_ratios_need_a_compressor_with_one():
    plan = make_plan("lags", TRACE, LINK)
    with pytest.raises(UsageError, match="gives each message a ratio, but 'fp16' has none"):
        compressed_iteration_s(plan, TRACE, LINK, "fp16")


def test_too_many_workers_to_play_are_not_predicted():
    many = msgspec.structs.replace(LINK, num_workers=MAX_WORKERS + 1)
    assert predicted_step_s(Planned(PLAN, trace=TRACE, link=many), "fp16") is None
