"""A timeline's file: it reads back as it was, and viewers find events that nest or lie apart."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.backends.protocol import Group
from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.base.plan import Message, Plan, TensorSlice
from testbed.base.recorder import Recorder
from testbed.control.inproc import InprocHub
from testbed.control.protocol import PIECE_BYTES
from testbed.launch.timeline import Recorded, _cores_used, hand_in
from testbed.records.timeline import (
    ClockLine,
    Kind,
    Timeline,
    TimelineEvent,
    decode_timeline,
    encode_timeline,
    process_of,
)

KINDS: tuple[Kind, ...] = ("compute", "send", "encode", "wait", "ready")

events = st.builds(
    lambda kind, rank, begin, length: TimelineEvent(
        kind=kind, name="x", rank=rank, step=5, begin_s=begin, end_s=begin + length, channel=0
    ),
    st.sampled_from(KINDS),
    st.integers(0, 2),
    st.integers(0, 30).map(lambda n: n / 8),
    st.integers(0, 20).map(lambda n: n / 8),
)


def timeline(found: list[TimelineEvent]) -> Timeline:
    in_order = sorted(found, key=lambda e: (e.begin_s, -e.end_s))
    return Timeline(backend="mpi-ring", num_workers=2, num_servers=1, events=tuple(in_order))


@given(st.lists(events, max_size=30))
def test_events_of_a_thread_nest_or_lie_apart_and_all_read_back(found: list[TimelineEvent]) -> None:
    data = encode_timeline(timeline(found))
    assert decode_timeline(data) == timeline(found)
    drawn = [e for e in json.loads(data)["traceEvents"] if e["ph"] == "X"]
    spans = [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in drawn]
    for index, (pid, tid, begin, end) in enumerate(spans):
        for other in spans[index + 1 :]:
            if other[:2] == (pid, tid):
                assert other[2] >= end or other[3] <= end, (begin, end, other)


def test_plan_link_and_clocks_read_back() -> None:
    part = TensorSlice(tensor=0, start=0, stop=4)
    plan = Plan(
        scheduler="wfbp",
        names=("w",),
        num_elements=(4,),
        dtypes=("float32",),
        messages=(Message(parts=(part,)),),
    )
    whole = Timeline(
        backend="gloo",
        num_workers=2,
        events=(TimelineEvent(kind="step", name="step 5", rank=0, step=5, begin_s=0, end_s=0.5),),
        clocks=(ClockLine(rank=1, offset_s=0.05, drift=5e-5, at_s=3.0, num_bursts=12),),
        plan=plan,
        link=Link(backend="gloo", num_workers=2, latency_s=1e-4, seconds_per_byte=1e-9),
        exposed_s={5: [0.1, 0.2]},
    )
    assert decode_timeline(encode_timeline(whole)) == whole


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"traceEvents": []}', b'{"otherData": {"schema": "x"}}']
)
def test_another_file_is_refused_with_its_name(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"cell\.json"):
        decode_timeline(data, "cell.json")


def test_what_is_handed_in_is_whole_on_rank_0_and_in_rank_order() -> None:
    hub, length = InprocHub(2), 60_000  # longer than one frame of the control plane

    def recorder(rank: int) -> Recorder:
        made = Recorder(length, on=True)
        for n in range(length):
            made.add("send", f"m{n}", n + rank, n + 0.5, step=n, channel=rank, num_bytes=8)
        made.bursts.append((1.0, 2.0 + rank, 3.0))
        made.cores_used[3] = (1.0, 0.5, 2.0 + rank)
        return made

    recorders = [recorder(rank) for rank in (0, 1)]
    recorders[0].beside[0] = server = recorder(2)

    def hand(rank: int) -> list[Recorded]:
        group = Group(rank, 2, hub.member(rank), recorder=recorders[rank])
        return hand_in(group, lambda at_s: at_s + 10)

    with ThreadPoolExecutor(2) as pool:
        on_first, elsewhere = pool.map(hand, (0, 1))
    assert elsewhere == []
    assert [each.rank for each in on_first] == [0, 1, 2]
    for got, sent in zip(on_first, [*recorders, server], strict=True):
        shown = [(*raw[:3], raw[3] + 10, raw[4] + 10, *raw[5:]) for raw in sent.events]
        assert got.events == shown
        assert len(msgspec.msgpack.encode(got)) > PIECE_BYTES
        assert got.cores_used == sent.cores_used
    assert [each.bursts for each in on_first[:2]] == [[(11.0, 2.0 + r, 13.0)] for r in (0, 1)]


def test_readings_of_the_cores_are_divided_among_the_steps_that_they_cover() -> None:
    reading = {4: (2.0, 1.0, 4.0), 5: (1.0, 1.0, 1.0)}
    found = _cores_used([3, 4, 5, 6], [Recorded(0, [], [], reading), Recorded(1, [], [])])
    assert found[3] == found[4] == [(1.0, 0.5, 2.0), (0.0, 0.0, 0.0)]
    assert found[5][0] == (1.0, 1.0, 1.0)
    assert found[6] == [(0.0, 0.0, 0.0)] * 2


def test_ranks_and_servers_are_called_alike_wherever_they_are_shown() -> None:
    found = timeline([])
    assert [process_of(found, rank) for rank in range(3)] == ["rank 0", "rank 1", "server 0"]


def test_the_first_step_that_lacks_an_event_is_told() -> None:
    """Under a plan that crosses the iteration what is dropped first may be of a later step."""
    recorder = Recorder(capacity=0, on=True)
    for step in (7, 6, 8):
        recorder.add("send", "m", 0.0, 1.0, step)
    assert (recorder.full_in, recorder.dropped) == (6, 3)
