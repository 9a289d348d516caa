"""What a timeline looks like in a terminal."""

from testbed.prediction.timeline import timeline
from testbed.reporting.drawing import draw
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


def test_nothing_to_draw():
    trace = make_trace([0], [0])
    text = draw(timeline(make_plan("wfbp", trace, make_link(1)), trace, make_link(1)))
    assert text.splitlines()[-1].startswith("0 .. 0 s; 1 message")
