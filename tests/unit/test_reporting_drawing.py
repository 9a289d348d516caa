"""What a timeline looks like in a terminal."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.prediction.timeline import timeline
from testbed.reporting.drawing import Panel, draw, svg_areas
from testbed.scheduling.protocol import make_plan
from tests.harness.traces import LINK_A, TRACE_A, make_link, make_trace


def test_timeline_as_bars():
    line = timeline(make_plan("asc-wfbp", TRACE_A, LINK_A), TRACE_A, LINK_A)
    assert draw(line, width=11 + 22).splitlines() == [
        "backward   bbbbbbbbbbbbbbb",
        "channel 0    #######      ======",
        "channel 1         #########",
        "0 .. 21 s; 3 messages; iteration 28 s, exposed 6 s, lower bound 22 s",
    ]


def test_waiting_is_drawn():
    line = timeline(make_plan("wfbp", TRACE_A, LINK_A), TRACE_A, LINK_A)
    bars = draw(line, width=11 + 33).splitlines()[1]
    assert bars == "channel 0    #######========#####=====#####"
    late = timeline(make_plan("cycle:ms=5000", TRACE_A, LINK_A), TRACE_A, LINK_A)
    assert " ..###" in draw(late, width=60).splitlines()[1]


@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 99), st.floats(0, 99)), min_size=2).filter(
        lambda rows: max(row[0] for row in rows) > 0.1 and max(row[1] + row[2] for row in rows) > 1
    )
)
def test_areas_reach_as_high_as_their_sum(rows):
    rows.sort()
    times, low, high = zip(*rows, strict=True)
    largest = max(a + b for a, b in zip(low, high, strict=True))
    drawing = svg_areas("t", "s", "MiB", [Panel("p", times, {"low": low, "high": high})])
    bottom, top = re.findall(r'<path fill="[^"]*" d="([^"]*)Z"', drawing)
    grid = [float(y) for y in re.findall(r'd="M70 ([0-9.]+)H', drawing)]
    ticks = [float(t) for t in re.findall(r'text-anchor="end" font-size="12">([^<]*)<', drawing)]
    scale = (grid[0] - grid[-1]) / ticks[-1]
    levels = [float(y) for y in re.findall(r"V([0-9.]+)", bottom + top)]
    assert min(levels) == pytest.approx(grid[0] - largest * scale, abs=1)
    assert max(levels) <= grid[0] + 1


def test_nothing_to_draw():
    trace = make_trace([0], [0])
    text = draw(timeline(make_plan("wfbp", trace, make_link(1)), trace, make_link(1)))
    assert text.splitlines()[-1].startswith("0 .. 0 s; 1 message")
