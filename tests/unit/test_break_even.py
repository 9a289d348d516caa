"""What factors cost, and between which bandwidths a method gains."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.base.files import load_shipped_trace
from testbed.base.link import Link
from testbed.prediction.algorithms import Ring
from testbed.prediction.break_even import MIN_GAIN
from testbed.prediction.extrapolate import at_bandwidth
from testbed.prediction.factors import factors, scaling
from testbed.prediction.timeline import Backward
from testbed.scheduling.break_even import Predictions, baselines, plan_and_predict
from testbed.scheduling.build import serial_stops
from testbed.scheduling.mg_wfbp import merge_streaming
from testbed.scheduling.protocol import make_plan
from tests.harness.traces import LINK_A, TRACE_A, make_trace
from tests.unit.crossing_cases import links, traces

TEN_GBIT = Link(
    backend="nccl",
    num_workers=16,
    latency_s=9.08e-4,
    seconds_per_byte=7.40e-10,
    concurrency_slowdown=(1.0, 1.5),
)


def test_factors_of_the_worked_example():
    stops = merge_streaming(Backward.of(TRACE_A), LINK_A)  # 10-23 and 23-28 after a start at 0
    found = factors(TRACE_A, stops, LINK_A)
    assert (found.iteration_s, found.compute_s) == (35, 22)
    assert found.startup_s == 28 - 20  # 10-19, 19-20
    assert found.bandwidth_s == 28 - 19  # 10-14, 15-19
    assert found.head_delay_s == 28 - 20  # 0-13, 15-20
    assert found.tail_s == 28 - 23
    assert found.slowdown_s == 0


def test_overlap_slows_what_comes_after_the_first_message():
    trace = make_trace([2, 4], [1, 1])
    # The first message travels from 2 to 7; of the second's 4 s of backward 5 / 1.5 s pass beside
    # it, the rest after it. It takes 5 s from then on; without the slowdown, from 7.
    found = factors(trace, [1, 2], LINK_A, overlap_slowdown=0.5)
    ready_s = 7 + 4 - 5 / 1.5
    assert found.iteration_s == pytest.approx(ready_s + 5)
    assert found.slowdown_s == pytest.approx(ready_s - 7)


def test_nothing_is_slowed_while_the_channel_is_idle():
    trace = make_trace([2, 100], [1, 1])  # the first message ends at 7, 95 s before the gradient
    found = factors(trace, [1, 2], LINK_A, overlap_slowdown=0.5)
    assert found.iteration_s == pytest.approx(2 + 100 + 5 - 5 / 1.5 + 5)
    assert found.slowdown_s == pytest.approx(5 - 5 / 1.5)


@settings(deadline=None, max_examples=60)
@given(traces(max_tensors=8), links, st.floats(0, 1))
def test_factors_are_savings(trace, link, slowdown):
    stops = serial_stops(make_plan("mg-wfbp", trace, link))
    found = factors(trace, stops, link, slowdown)
    assert factors(trace, stops, link).iteration_s == scaling(trace, stops, link).iteration_s
    floor_s = trace.forward_s + trace.backward_s
    for saved_s in (
        found.startup_s,
        found.bandwidth_s,
        found.head_delay_s,
        found.tail_s,
        found.slowdown_s,
    ):
        assert -1e-9 <= saved_s <= found.iteration_s - floor_s + 1e-9


@pytest.mark.parametrize("spec", ["pace", "dear", "p3", "asc-wfbp", "bytescheduler"])
def test_only_messages_one_after_another_have_stops(spec):
    assert serial_stops(make_plan(spec, TRACE_A, LINK_A)) is None
    assert serial_stops(make_plan("bucket", TRACE_A, LINK_A)) is not None


def test_mixed_dtypes_have_no_stops():
    mixed = make_trace([1, 1, 1], [4, 4, 4], dtypes=["float32", "float16", "float32"])
    assert serial_stops(make_plan("sequential", mixed, LINK_A)) is None


def test_a_method_gains_between_its_two_break_even_bandwidths():
    trace = load_shipped_trace("resnet50-v100")
    specs = ("mg-wfbp", "optimal", "asc-wfbp", "dear")

    def gain(spec, factor):
        link = at_bandwidth(TEN_GBIT, factor)
        plain_s = min(plan_and_predict(p, trace, link)[1].iteration_s for p in baselines())
        return plain_s / plan_and_predict(spec, trace, link)[1].iteration_s - 1

    predictions = Predictions(trace, TEN_GBIT, Ring(), specs)
    for spec in specs:
        found = predictions.gain_range(spec)
        assert found.best_gain >= MIN_GAIN
        assert gain(spec, found.best_factor) == found.best_gain
        for bound, outside in ((found.from_factor, 1 / 1.1), (found.to_factor, 1.1)):
            if bound is not None:
                assert gain(spec, bound) >= MIN_GAIN
                assert gain(spec, bound * outside) < MIN_GAIN


def test_plain_methods_never_gain_on_themselves():
    predictions = Predictions(TRACE_A, LINK_A, Ring(), baselines())
    for found in map(predictions.gain_range, baselines()):
        assert found.best_gain < MIN_GAIN
        assert (found.from_factor, found.to_factor) == (None, None)
