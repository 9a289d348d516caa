"""What a cluster's description says, and what is refused by name; no privilege needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.base.axes import BACKENDS, BackendFacts
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.link import Link, Piece
from testbed.base.parts import Part, Resolved
from testbed.cluster.emulate import Cluster
from testbed.cluster.facts import Facts
from testbed.cluster.spec import dilation_of, parse_changes, parse_cluster
from testbed.cluster.system import abandoned, own_prefix, tcp_settings
from testbed.cluster.topology import Topology
from testbed.commands.checks import check_places, cluster_text, in_cluster
from testbed.prediction.emulated import stretched_link
from testbed.records.cell import Cell
from testbed.reporting.work import undilated


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("nodes=0", "nodes is 0"),
        ("nodes=251", "at most 250"),
        ("nodes=two", "nodes is 'two'"),
        ("rate=fast", "rate is 'fast'"),
        ("rate=0gbit", "rate is '0gbit'"),
        ("dilation=-1", "dilation is -1"),
        ("latency=soon", "duration is 'soon'"),
        ("jitter=1ms", "no more jitter than latency"),
        ("loss=2", "loss is '2'"),
        ("loss=much", "loss is 'much'"),
        ("loss=1%,latency_by=injected", "loss needs netem"),
        ("latency_by=magic", "latency_by is 'magic'"),
        ("nodes=2,rate.3=1gbit", "node is 3; expected 1 .. 2"),
        ("speed.2=1gbit", "no option 'speed.2'"),
        ("change=10s:up.2:down", "10s:2:down (both directions)"),
        ("links=up", "no option 'links'"),
        ("wires=2", "no option 'wires'"),
        ("change=1s:2", "change is '1s:2'"),
        ("change=1s:left.2:1gbit", "change is '1s:left.2:1gbit'"),
        ("change=1s:9:1gbit", "node is 9"),
        ("change=1s:1:0gbit", "change is '1s:1:0gbit'"),
        ("ranks_per_node=0", "ranks_per_node is 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_cluster(text)
    assert word in str(caught.value)


RATES = st.sampled_from(["1gbit", "10gbit", "250mbit", "2.5gbit"])


@given(
    nodes=st.integers(2, 250),
    rate=RATES,
    dilation=st.sampled_from([1.0, 2.5, 10.0, 100.0]),
    own=st.dictionaries(st.tuples(st.sampled_from(["up", "down"]), st.integers(1, 2)), RATES),
    latency=st.sampled_from(["0", "50us", "1.5ms"]),
)
def test_the_text_of_a_cluster_describes_it(
    nodes: int, rate: str, dilation: float, own: dict[tuple[str, int], str], latency: str
) -> None:
    words = [f"nodes={nodes},rate={rate},dilation={dilation},latency={latency}"]
    spec = parse_cluster(",".join(words + [f"{d}.{n}={r}" for (d, n), r in own.items()]))
    assert parse_cluster(spec.text()) == spec
    assert dilation_of(spec.text()) == dilation
    for node in (1, 2):
        for direction in ("up", "down"):
            asked = spec.link_bps(node, direction)
            assert spec.kernel_bps(node, direction) * dilation == pytest.approx(asked)


def test_rates_of_a_node_replace_the_common_one() -> None:
    spec = parse_cluster("nodes=3,rate=10gbit,rate.2=1gbit,up.3=100mbit,dilation=10")
    assert [spec.kernel_bps(n, "up") for n in (1, 2, 3)] == [1e9, 1e8, 1e7]
    assert [spec.kernel_bps(n, "down") for n in (1, 2, 3)] == [1e9, 1e8, 1e9]
    assert spec.slowest_kernel_bps == 1e7


def test_changes_are_sorted_and_know_what_cuts() -> None:
    first, second, third = parse_changes("3s:2:down+1s:all:1gbit+2s:down.1:2gbit")
    assert (first.node, first.rate_bps, second.direction, third.cuts) == (None, 1e9, "down", True)
    assert third.rate_bps == 0


def test_every_direction_of_every_node_is_shaped_once() -> None:
    topology = Topology("p-", parse_cluster("nodes=3,rate=1gbit,up.2=10mbit"))
    for shaper, what in (("htb", "class"), ("tbf", "qdisc")):
        commands = replace(topology, shaper=shaper).build()
        shaped = [c for c in commands if "rate" in c]
        assert {(c[3], shaper in c) for c in shaped} == {(what, True)}
        assert len(shaped) == len({(c[2], c[c.index("dev") + 1]) for c in shaped}) == 6
        assert [c[c.index("rate") + 1] for c in shaped].count("10000000bit") == 1
        assert set(topology.namespaces) >= {c[2] for c in commands}
        # What TCP hands over is cut to size where one packet leaves the bucket overdrawn.
        assert sum("gso_max_size" in c for c in commands) == (6 if shaper == "htb" else 0)


def test_netem_delays_one_way_and_stretched() -> None:
    spec = parse_cluster("nodes=2,latency=50us,jitter=10us,loss=0.1%,dilation=10")
    delaying = [c for c in Topology("p-", spec, "netem").build() if "netem" in c]
    assert len(delaying) == spec.nodes
    text = " ".join(delaying[0])
    assert text.endswith("delay 500us 100us loss 0.1%")
    assert not [c for c in Topology("p-", spec, "injected").build() if "netem" in c]


def test_where_a_relay_is_the_switch_nothing_else_shapes_or_bridges() -> None:
    topology = Topology("p-", parse_cluster("nodes=2,latency=1ms,dilation=40"), "relay")
    words = {word for command in topology.build() for word in command}
    assert words.isdisjoint({"bridge", "veth", "tc", "htb", "tbf", "netem"})
    assert {node.mac for node in topology.nodes} <= words


def test_a_relay_is_for_clusters_that_leave_it_the_cores() -> None:
    assert parse_cluster("latency=1ms,latency_by=relay,dilation=40").latency_by == "relay"
    for text, word in (
        ("latency=1ms,latency_by=relay,dilation=39", "write dilation=40"),
        ("latency=1ms,latency_by=relay,dilation=40,change=1s:all:1gbit", "keep their rates"),
        ("latency=1ms,latency_by=relay,dilation=40,loss=1%", "loss needs netem"),
    ):
        with pytest.raises(UsageError, match=word):
            parse_cluster(text)


def test_what_is_on_its_way_fits_the_window_and_only_where_packets_are_delayed() -> None:
    spec = parse_cluster("nodes=2,rate=10gbit,latency=1ms,jitter=250us,dilation=10")
    delayed = Topology("p-", spec, "netem")
    assert delayed.round_trip_s == pytest.approx(25e-3)
    assert Topology("p-", spec, "injected").round_trip_s == 0
    window = int(tcp_settings(1e9, delayed.round_trip_s)["ipv4/tcp_wmem"].split()[-1])
    assert window == pytest.approx(1e9 / 8 * (1e-3 + 1.5 * 25e-3))
    for mechanism, least in (("netem", window), ("relay", window), ("injected", 1 << 20)):
        cluster = Cluster(Topology("p-", spec, mechanism), Path("nowhere"))
        assert cluster.environment({})["OMPI_MCA_btl_tcp_sndbuf"] == str(least)


def test_only_what_a_dead_owner_left_is_abandoned() -> None:
    mine = own_prefix() + "-n1"
    pid, start = mine.split("-")[1:3]
    reborn = f"testbed-{pid}-{int(start) - 1}-0-n1"
    assert abandoned([mine, reborn, "testbed-x-1-0", "other", f"x{reborn}"]) == [reborn]


def toy(num_servers: int = 0, in_process: bool = False) -> Resolved[BackendFacts]:
    facts = BackendFacts(num_servers=num_servers, in_process=in_process)
    part = Part("toy", "", lambda *given: pytest.fail("not to be opened"), facts=lambda _: facts)
    return BACKENDS.join(part, part.options(), "toy")


def test_workers_fill_the_places_that_servers_leave() -> None:
    assert check_places("nodes=4,ranks_per_node=2", toy(), None) == 8
    assert check_places("nodes=4", toy(num_servers=1), None) == 3
    assert check_places("nodes=4", toy(), 2) == 2
    with pytest.raises(UsageError, match="give nodes=8"):
        check_places("nodes=4", toy(num_servers=4), 4)
    with pytest.raises(UsageError, match="threads of one process"):
        check_places("nodes=4", toy(in_process=True), None)


def test_inside_a_cluster_no_other_is_started() -> None:
    here = Facts(spec="nodes=2,rate=1gbit", dilation=1.0, places=2, hostfile="hosts")
    assert cluster_text(None, here) == cluster_text("rate=1gbit,nodes=2", here) == here.spec
    assert cluster_text("dilation=10,nodes=2", None) == "nodes=2,rate=10gbit,dilation=10"
    with pytest.raises(UsageError, match="inside the cluster"):
        cluster_text("nodes=4", here)


def test_tables_divide_by_the_dilation_and_records_do_not() -> None:
    cell = Cell(
        backend="mpi",
        workload="w",
        num_workers=2,
        config=RunConfig(),
        step_time_s=2.0,
        predicted_step_time_s=1.0,
        samples_per_s=32.0,
        time_to_accuracy_s={"0.9": 50.0, "0.99": None},
        time_to_loss_s={"2.5": 30.0},
    )
    facts = Facts(spec="nodes=2", dilation=10.0, places=2, hostfile="", record={"spec": "nodes=2"})
    kept = in_cluster(cell, facts)
    assert (kept.step_time_s, kept.dilation, kept.cluster) == (2.0, 10.0, {"spec": "nodes=2"})
    shown = undilated(kept)
    assert (shown.step_time_s, shown.predicted_step_time_s) == (0.2, 0.1)
    assert shown.samples_per_s == 320.0
    assert shown.time_to_accuracy_s == {"0.9": 5.0, "0.99": None}
    assert shown.time_to_loss_s == {"2.5": 3.0}
    assert undilated(cell) is cell


def test_what_was_measured_on_another_cluster_than_asked_for_is_no_result() -> None:
    cell = Cell(backend="mpi", workload="w", num_workers=2, config=RunConfig(), step_time_s=2.0)
    facts = Facts(spec="nodes=2", dilation=1.0, places=2, hostfile="", failure="link 1 stayed up")
    kept = in_cluster(cell, facts)
    assert (kept.status, kept.error, kept.step_time_s) == ("failed", "link 1 stayed up", None)
    earlier = msgspec.structs.replace(cell, status="failed", error="rank 1 was lost")
    assert in_cluster(earlier, facts).error == "rank 1 was lost"


@given(factor=st.floats(0.01, 100), num_bytes=st.integers(1, 1 << 30))
def test_a_stretched_link_takes_so_many_times_longer(factor: float, num_bytes: int) -> None:
    pieces = (
        Piece(max_bytes=1e6, latency_s=1e-4, seconds_per_byte=2e-9),
        Piece(latency_s=1e-3, seconds_per_byte=1e-9),
    )
    link = Link(
        backend="x",
        num_workers=2,
        latency_s=1e-4,
        seconds_per_byte=1e-9,
        pieces=pieces,
        concurrency_slowdown=(1.0, 1.5),
    )
    slower = stretched_link(link, factor)
    assert slower.time_s(num_bytes) == pytest.approx(factor * link.time_s(num_bytes))
    assert slower.slowdown(2) == link.slowdown(2)
    back = stretched_link(slower, 1 / factor)
    assert back.time_s(num_bytes) == pytest.approx(link.time_s(num_bytes))
