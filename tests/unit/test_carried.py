"""A link of one emulated cluster on another: bytes go with the rate, start-ups with the hosts."""

from dataclasses import replace

import pytest

from testbed.base.errors import UsageError
from testbed.base.link import Link, Piece
from testbed.prediction.emulated import Setting, carried, setting_of

LINK = Link(
    backend="x",
    num_workers=4,
    latency_s=3e-4,
    seconds_per_byte=1.2e-9,
    pieces=(
        Piece(max_bytes=1e5, latency_s=1e-4, seconds_per_byte=2e-9),
        Piece(latency_s=4e-4, seconds_per_byte=1.1e-9),
    ),
)


def test_the_same_cluster_changes_nothing():
    same = Setting(10e9, 10.0, 5e-5)
    there = carried(LINK, same, same)
    for num_bytes in (10, 1e5, 1e7):
        assert there.time_s(num_bytes) == pytest.approx(LINK.time_s(num_bytes), rel=1e-12)


@pytest.mark.parametrize("factor", [0.1, 0.5, 4.0])
def test_only_bytes_take_longer_on_a_slower_link(factor):
    there = carried(LINK, Setting(10e9), Setting(10e9 * factor))
    for num_bytes in (10, 1e4, 1e7):
        piece = LINK.piece(num_bytes)
        assert there.time_s(num_bytes) == pytest.approx(
            piece.latency_s + num_bytes * piece.seconds_per_byte / factor
        )


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_of_a_byte_the_wire_s_part_goes_with_the_rate_and_the_rest_with_the_hosts(factor):
    wire = 1e-9
    measured, asked = Setting(10e9, 10.0, nodes_per_core=2.0), Setting(10e9 * factor, 40.0)
    there = carried(LINK, measured, asked, wire)
    assert there.seconds_per_byte == pytest.approx(wire / factor + 0.2e-9 / 4)
    assert there.pieces[0].seconds_per_byte == pytest.approx(wire / factor + 1e-9 / 4)
    crowded = carried(LINK, measured, replace(asked, nodes_per_core=4.0), wire)
    assert crowded.seconds_per_byte == pytest.approx(wire / factor + 2 * 0.2e-9 / 4)
    # A wire cannot need more than was measured.
    fast = carried(LINK, measured, asked, 2e-9)
    assert fast.seconds_per_byte == pytest.approx(LINK.seconds_per_byte / factor)


def test_hosts_seem_faster_where_everything_else_is_slower():
    there = carried(LINK, Setting(10e9, dilation=1.0), Setting(10e9, dilation=10.0))
    assert there.latency_s == pytest.approx(3e-5)
    assert there.seconds_per_byte == LINK.seconds_per_byte


def test_latency_is_replaced_and_never_makes_a_start_up_negative():
    there = carried(LINK, Setting(10e9, latency_s=2e-4), Setting(10e9, latency_s=1e-3))
    assert there.latency_s == pytest.approx(1e-4 + 1e-3)
    assert there.pieces[0].latency_s == pytest.approx(1e-3)  # 1e-4 was less than the latency


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"rate_bps": 0.0}, "above 0"), ({"rate_bps": 1e9, "dilation": -1.0}, "above 0")],
)
def test_a_setting_must_make_sense(asked, message):
    with pytest.raises(UsageError, match=message):
        Setting(**asked)


def test_the_slowest_way_of_any_node_is_the_rate_and_delayed_packets_need_an_algorithm():
    links = [
        {"node": 1, "up_bps": 2e9, "down_bps": 3e9},
        {"node": 2, "up_bps": 4e9, "down_bps": 1e9},
    ]
    record = {"links": links, "dilation": 2.0, "latency": "injected", "latency_s": 1e-3}
    old = setting_of(record)  # of a time without others
    assert old == Setting(1e9, 2.0, 1e-3, "other", "shared", awake=False)
    now = {**record, "cpu_policy": "batch", "cores": "pinned", "cores_awake": "yes"}
    assert setting_of(now) == Setting(1e9, 2.0, 1e-3)
    with pytest.raises(UsageError, match="cores=shared,awake=no and the cluster has"):
        carried(LINK, old, Setting(1e9))
    with pytest.raises(UsageError, match="add cpu_policy=batch,cores=shared,awake=auto to"):
        carried(LINK, setting_of({**now, "cores": "shared"}), Setting(1e9))
    for halted in ("no: Permission denied", "no: awake=no"):
        with pytest.raises(UsageError, match="cores=pinned,awake=no and the cluster has"):
            carried(LINK, setting_of({**now, "cores_awake": halted}), Setting(1e9))
    with pytest.raises(UsageError, match="measured where packets were delayed"):
        setting_of({**record, "latency": "netem"})
    dealt = {**now, "node_cores": [[0], [1], [0], [1]]}
    assert (setting_of(dealt).nodes_per_core, setting_of(now).nodes_per_core) == (2.0, None)
    assert setting_of({**now, "node_cores": [[0, 1], [2, 3]]}).nodes_per_core == 1.0
    assert setting_of({**now, "latency": "relay"}, num_startups=6) == Setting(1e9, 2.0, 6e-3)
