"""What a plan and a timeline look like in a terminal."""

import msgspec

from testbed.base.plan import Message, TensorSlice
from testbed.prediction.timeline import timeline
from testbed.scheduling.protocol import make_plan
from testbed.scheduling.show import draw, plan_table
from tests.harness.traces import LINK_A, TRACE_A, make_link, make_trace


def test_table_lists_messages():
    assert plan_table(make_plan("asc-wfbp", TRACE_A, LINK_A)).splitlines() == [
        "asc-wfbp: 3 messages, 5 tensors, 2 channels, fifo",
        "3 messages, up to 2 under way at once",
        "message  channel  priority  size  tensors",
        "      0        0         0   3 B  t4",
        "      1        1         0   5 B  t3 .. t2 (2 tensors)",
        "      2        0         0   2 B  t1 .. t0 (2 tensors)",
    ]


def test_table_of_slices_and_of_many_messages():
    plan = make_plan("wfbp", TRACE_A, LINK_A)
    slices = tuple(Message(parts=(TensorSlice(3, i, i + 1),)) for i in range(4))
    cut = msgspec.structs.replace(plan, messages=(*plan.messages, *slices), reason="")
    text = plan_table(cut, max_rows=6)
    assert text.splitlines()[0] == "wfbp: 9 messages, 5 tensors, 1 channel, fifo"
    assert text.splitlines()[-2].endswith("t3[0:1]")
    assert text.splitlines()[-1] == "... and 3 more"
    assert len(plan_table(cut, max_rows=0).splitlines()) == 2 + 9


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
