"""Virtual clocks of a relayed cluster's links: rate, latency, order; no time passes here."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.cluster.switching import Switch, is_pure_ack, wire_bytes

BPS, LATENCY_S = 1e6, 0.5


def arrivals(switch, until_s=math.inf):
    """(time, data) of everything, asked for as a process asks: each time something is due."""
    found = []
    while (next_s := switch.next_s()) is not None and next_s <= until_s:
        found += [(arrival.at_s, arrival.data) for arrival in switch.due(next_s)]
    return found


def line(num_nodes=3, **given):
    return Switch([BPS] * num_nodes, [BPS] * num_nodes, LATENCY_S, **given)


def test_a_pause_saves_nothing_up():
    switch = line()
    for _ in range(4):
        switch.send(0, 1, 125, b"", now_s=100.0)
    times = [at_s for at_s, _ in arrivals(switch)]
    assert times == pytest.approx([100.0 + LATENCY_S + 1e-3 * n for n in (1, 2, 3, 4)])


def test_two_senders_share_the_way_down_whoever_queues_longer():
    """The second sender's frame leaves late in the first's queue, and does not wait for its end."""
    switch = line()
    for number in range(10):
        switch.send(0, 2, 125, b"a%d" % number, now_s=0.0)
    switch.send(1, 2, 125, b"b", now_s=2.5e-3)
    order = [data for _, data in arrivals(switch)]
    assert order.index(b"b") == 3
    assert arrivals(switch) == []


def test_the_slower_of_both_ways_is_the_rate():
    for rates in (([BPS, BPS], [BPS, BPS / 4]), ([BPS / 4, BPS], [BPS, BPS])):
        switch = Switch(*rates, LATENCY_S)
        for _ in range(3):
            switch.send(0, 1, 125, b"", now_s=0.0)
        times = [at_s for at_s, _ in arrivals(switch)]
        assert times == pytest.approx([LATENCY_S + 4e-3 * n for n in (1, 2, 3)])


def test_acknowledgements_pass_the_queues_by_and_take_their_share():
    switch = line()
    for _ in range(8):
        switch.send(0, 1, 125, b"data", now_s=0.0)
    switch.send(0, 1, 125, b"ack", now_s=0.0, waits=False)
    switch.send(0, 1, 125, b"last", now_s=0.0)
    found = {data: at_s for at_s, data in arrivals(switch)}
    assert found[b"ack"] == LATENCY_S
    assert found[b"last"] == pytest.approx(LATENCY_S + 10e-3)


FRAMES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(60, 20_000), st.floats(0, 0.01)),
    min_size=1,
    max_size=60,
)


@given(frames=FRAMES, jitter_s=st.sampled_from([0.0, 0.1, LATENCY_S]), seed=st.integers(0, 9))
def test_frames_keep_their_order_their_latency_and_the_rate(frames, jitter_s, seed):
    switch = line(jitter_s=jitter_s, seed=seed)
    sent, now_s = [], 0.0
    for number, (source, target, num_bytes, later_s) in enumerate(frames):
        now_s += later_s
        switch.send(source, target, num_bytes, b"%d" % number, now_s)
        sent.append((source, target, num_bytes, now_s))
    found = {int(data): at_s for at_s, data in arrivals(switch)}
    assert len(found) == len(sent)
    for number, (source, target, num_bytes, at_s) in enumerate(sent):
        least_s = LATENCY_S - jitter_s + 8 * num_bytes / BPS
        assert found[number] >= at_s + least_s - 1e-9
        before = [n for n in range(number) if sent[n][:2] == (source, target)]
        assert all(found[n] <= found[number] for n in before)
    for node in range(3):
        order = sorted((found[n], s[2]) for n, s in enumerate(sent) if s[1] == node)
        for (earlier_s, _), (later_s, num_bytes) in itertools.pairwise(order):
            assert later_s - earlier_s >= 8 * num_bytes / BPS - 1e-9


def tcp(payload=0, flags=0x10, options=12):
    length = 40 + options + payload
    ip = b"\x45\x00" + length.to_bytes(2, "big") + bytes(5) + b"\x06" + bytes(10)
    head = bytes(12) + bytes(((20 + options) // 4 << 4, flags)) + bytes(6 + options)
    return bytes(12) + b"\x08\x00" + ip + head + bytes(payload)


def test_only_an_acknowledgement_without_payload_is_one():
    assert is_pure_ack(tcp())
    assert is_pure_ack(tcp(options=36))
    for other in (tcp(payload=1), tcp(flags=0x12), tcp(flags=0x11), tcp(flags=0x14), tcp(flags=0)):
        assert not is_pure_ack(other)
    assert not is_pure_ack(tcp().replace(b"\x08\x00\x45", b"\x86\xdd\x45"))
    assert not is_pure_ack(tcp()[:23] + b"\x11" + tcp()[24:])
    assert not is_pure_ack(tcp()[:40])


@given(pieces=st.integers(1, 11), rest=st.integers(1, 1448))
def test_what_is_cut_up_counts_the_headers_of_every_piece(pieces, rest):
    payload = 1448 * (pieces - 1) + rest
    assert wire_bytes(tcp(payload), 1448) == payload + 66 * pieces
