"""What messages cost the computing thread, against examples by hand and a thread played naively."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.base.errors import UsageError
from testbed.base.files import decode_link, encode_link
from testbed.base.link import PROCESSOR_TIMES, Link
from testbed.base.trace import Trace
from testbed.prediction.algorithms import Ring
from testbed.prediction.codec import CodecCost, CodecSample, RoundCost
from testbed.prediction.compressed import compressed_timeline
from testbed.prediction.cross_iteration import predict
from testbed.prediction.emulated import Setting, carried, stretched_link
from testbed.prediction.extrapolate import extrapolate
from testbed.prediction.timeline import Timeline
from testbed.profiling.table import link_table
from testbed.scheduling.protocol import make_plan
from tests.unit.crossing_cases import LINK_A, TRACE_A, grouped_plan, trace_of

COSTS = {"submit_s": 1.0, "landing_s": 0.5}
LINK = msgspec.structs.replace(LINK_A, **COSTS)
WHOLE = [[i] for i in reversed(range(5))]


def test_backward_stands_still_for_each_message_and_each_result_is_taken() -> None:
    # Ready at 2 4 7 10 15 without messages, submitted at 3 6 10 14 20; on the link from
    # 3 to 10, 18, 23, 28, 33; taken from 20 on at 20.5, 21, 23.5, 28.5, 33.5; forward takes 7.
    found = predict(make_plan("wfbp", TRACE_A, LINK), TRACE_A, LINK)
    assert [s.ready_s for s in found.spans] == [3, 6, 10, 14, 20]
    assert [s.end_s for s in found.spans] == [10, 18, 23, 28, 33]
    assert (found.backward_s, found.exposed_s, found.iteration_s) == (20, 13.5, 40.5)


def test_one_message_behind_backward_costs_once() -> None:
    # Submitted at 16, ended at 30, taken at 30.5.
    found = predict(make_plan("sequential", TRACE_A, LINK), TRACE_A, LINK)
    assert (found.backward_s, found.iteration_s) == (16, 37.5)


def test_a_thread_that_launches_delays_messages_and_not_the_device() -> None:
    plan = make_plan("wfbp", TRACE_A, LINK)
    found = predict(plan, TRACE_A, LINK, launches=True)
    assert [s.ready_s for s in found.spans] == [3, 5, 8, 11, 16]
    assert (found.backward_s, found.iteration_s) == (16, 40.5)
    busy = msgspec.structs.replace(LINK, submit_s=4.0)  # the thread falls behind
    assert [s.ready_s for s in predict(plan, TRACE_A, busy, launches=True).spans] == [
        *(6, 10, 14, 18, 22)
    ]


def test_in_the_next_forward_pass_a_layer_takes_its_own_results() -> None:
    # From 20 on: layer 1 waits for 33, then 0.5 and 2; then 0.5 + 2, and three times 0.5 + 1.
    found = predict(grouped_plan(TRACE_A, WHOLE), TRACE_A, LINK)
    assert found.iteration_s == 42.5


def test_halves_are_submitted_and_taken_twice() -> None:
    # Folds end at 6.5 10.5 13 16.5 22.5 and are taken by 23; spreads are submitted from 24 to 28
    # and end at 26.5 29 31.5 35.5 39; layers end at 30.5 33 34.5 37 40.5.
    found = predict(grouped_plan(TRACE_A, WHOLE, halves=True), TRACE_A, LINK)
    assert [s.end_s for s in found.spans] == [6.5, 10.5, 13, 16.5, 22.5, 26.5, 29, 31.5, 35.5, 39]
    assert found.iteration_s == 40.5


def test_compressed_messages_cost_the_thread_as_dense_ones_do() -> None:
    dense = CodecCost(
        compressor="dense",
        num_workers=2,
        samples=tuple(
            CodecSample(
                num_elements=n,
                compute_s=(0.0, 0.0),
                rounds=(RoundCost(form="sum", num_bytes=4.0 * n),),
            )
            for n in (1, 100)
        ),
    )
    for plan in (make_plan("wfbp", TRACE_A, LINK), grouped_plan(TRACE_A, WHOLE)):
        found = compressed_timeline(plan, TRACE_A, LINK, Ring(), dense)
        assert found.iteration_s == pytest.approx(predict(plan, TRACE_A, LINK).iteration_s)


def played(trace: Trace, link: Link, launches: bool) -> float:
    """The iteration of one message for each tensor: a thread that does one thing after another."""
    now_s = device_s = free_s = 0.0
    ends = []
    for tensor in reversed(trace.tensors):
        device_s += tensor.backward_s
        now_s = max(now_s, device_s) if launches else now_s + tensor.backward_s
        now_s += link.submit_s
        free_s = max(free_s, now_s) + link.time_s(tensor.num_bytes)
        ends.append(free_s)
    now_s = max(now_s, device_s)
    for end_s in ends:
        now_s = max(now_s, end_s) + link.landing_s
    return now_s + trace.forward_s


times = st.integers(0, 6)


@given(
    rows=st.lists(st.tuples(times, st.integers(1, 8), times), min_size=1, max_size=6),
    constants=st.tuples(times, times, times, times),
    launches=st.booleans(),
)
def test_it_is_as_a_thread_that_does_one_thing_after_another(
    rows: list[tuple[int, int, int]], constants: tuple[int, int, int, int], launches: bool
) -> None:
    trace = trace_of(*(list(column) for column in zip(*rows, strict=True)))
    latency_s, per_byte, submit_s, landing_s = constants
    link = Link(
        backend="x",
        num_workers=2,
        latency_s=latency_s,
        seconds_per_byte=per_byte,
        submit_s=submit_s,
        landing_s=landing_s,
    )
    found: Timeline = predict(make_plan("wfbp", trace, link), trace, link, launches=launches)
    assert found.iteration_s == played(trace, link, launches)


def test_one_worker_submits_nothing() -> None:
    alone = msgspec.structs.replace(LINK, num_workers=1)
    assert predict(make_plan("wfbp", TRACE_A, alone), TRACE_A, alone).iteration_s == 22


def test_processor_times_go_with_the_hosts_and_not_with_the_network() -> None:
    link = msgspec.structs.replace(LINK, thread_s=0.25)

    def of(found: Link) -> list[float]:
        return [getattr(found, name) for name in PROCESSOR_TIMES]

    assert of(extrapolate(link, Ring(), 8)) == [1.0, 0.5, 0.25]
    assert of(stretched_link(link, 0.5)) == [0.5, 0.25, 0.125]
    assert of(carried(link, Setting(1e9, dilation=1), Setting(5e9, dilation=10))) == pytest.approx(
        [0.1, 0.05, 0.025]
    )


def test_a_link_keeps_them_and_older_files_have_none() -> None:
    assert decode_link(encode_link(LINK)) == LINK
    old = (
        b'{"schema":"testbed.link/1","backend":"x","num_workers":2,"latency_s":1,'
        b'"seconds_per_byte":1}'
    )
    assert decode_link(old).submit_s == 0.0
    wrong = old.replace(b'"latency_s":1', b'"latency_s":1,"submit_s":-1')
    with pytest.raises(UsageError, match="'submit_s' is -1"):
        decode_link(wrong)
    told = msgspec.structs.replace(
        LINK, thread_s=2.0, extra={"fit": {"sizes": [], "relative_residual_median": 0.0}}
    )
    assert "1 s to submit and 500 ms to take its result" in link_table(told)
