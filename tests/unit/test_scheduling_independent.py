"""Groups and exposed times against a second, plain implementation, on traces of known models."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.base.files import load_shipped_trace, shipped_traces
from testbed.base.link import Link
from testbed.base.trace import Trace, TraceTensor
from testbed.prediction.timeline import timeline
from testbed.scheduling.bucket import MIB
from testbed.scheduling.protocol import make_plan
from tests.harness import formulas
from tests.harness.traces import SLOWDOWN

# Start-up [s] and time per byte [s/B] of measured clusters, 10 Gbit/s Ethernet and InfiniBand.
LINKS = ((4.04e-3, 8.64e-10), (9.08e-4, 7.40e-10), (2.36e-4, 4.06e-10), (1.369e-3, 1.657e-9))


def sigma(count):
    return max((count + 1) / 2, count / 1.6)


def link_of(a, b):
    return Link(
        backend="x",
        num_workers=16,
        latency_s=a,
        seconds_per_byte=b,
        concurrency_slowdown=SLOWDOWN,
    )


def layers_of(trace, a, b):
    t_b = [0.0, *(t.backward_s for t in trace.tensors)]
    return formulas.Layers(t_b, [0.0, *(float(t.num_bytes) for t in trace.tensors)], a, b)


def simulated(spec, trace, a, b):
    """The groups, as layers numbered from 1 in backward order, and the exposed time."""
    line = timeline(make_plan(spec, trace, link_of(a, b)), trace, link_of(a, b))
    return [[index + 1 for index in span.tensors] for span in line.spans], line.exposed_s


def check_rules(trace, a, b):
    layers = layers_of(trace, a, b)
    end_of_backward = layers.ready()[1]
    rules = {
        "wfbp": formulas.wfbp(layers),
        "sequential": formulas.sequential(layers),
        "mg-wfbp": formulas.mg_wfbp(layers),
        "asc-wfbp:channels=1": formulas.asc_wfbp(layers),
        "bucket": formulas.bucket(layers, 25 * MIB, MIB),
        "bucket:mib=4,first_mib=4": formulas.bucket(layers, 4 * MIB, 4 * MIB),
    }
    for spec, groups in rules.items():
        found, exposed_s = simulated(spec, trace, a, b)
        assert found == groups, spec
        expected_s = max(0.0, formulas.serial(layers, groups)[-1][1] - end_of_backward)
        if spec == "sequential":
            expected_s = layers.cost(sum(layers.m))
        assert exposed_s == pytest.approx(expected_s, abs=1e-9), spec
    for channels in (2, 3):
        groups = formulas.asc_wfbp(layers)
        found, exposed_s = simulated(f"asc-wfbp:channels={channels}", trace, a, b)
        assert found == groups
        ends = [end for _, end in formulas.concurrent(layers, groups, channels, sigma)]
        assert exposed_s == pytest.approx(max(0.0, max(ends) - end_of_backward), abs=1e-9)
    osf_s = max(0.0, formulas.osf_end(layers) - end_of_backward)
    assert simulated("osf", trace, a, b)[1] == pytest.approx(osf_s, abs=1e-9)
    exact_s = max(0.0, formulas.exact_end(layers) - end_of_backward)
    assert simulated("optimal", trace, a, b)[1] == pytest.approx(exact_s, abs=1e-9)


@pytest.mark.parametrize("a_b", LINKS, ids=lambda p: f"{p[0]:g}")
@pytest.mark.parametrize("name", shipped_traces())
def test_shipped_traces(name, a_b):
    check_rules(load_shipped_trace(name), *a_b)


tensors = st.builds(
    lambda elements, backward_s: TraceTensor(
        name="w", num_elements=elements, forward_s=0.0, backward_s=backward_s
    ),
    st.one_of(st.just(0), st.integers(1, 5_000_000)),
    st.one_of(st.just(0.0), st.floats(1e-6, 1e-2)),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(tensors, min_size=1, max_size=30),
    st.floats(0, 1e-2),
    st.floats(1e-11, 1e-8),
)
def test_random_traces(rows, a, b):
    trace = Trace(name="random", device="none", batch_size=1, tensors=tuple(rows))
    check_rules(trace, a, b)
