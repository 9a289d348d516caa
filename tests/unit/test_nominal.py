"""Links of nominal numbers: `--link rate=10gbit,latency=50us`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.base.config import RunConfig
from testbed.base.errors import TestbedError, UsageError
from testbed.base.files import save_link
from testbed.base.link import Link
from testbed.commands.checks import check_inputs
from testbed.commands.simulate import simulate
from testbed.prediction.nominal import HEADERS, kind_of, link_among, parse_nominal, read_link
from tests.unit.crossing_cases import LINK_A

TEXT = "rate=10gbit,latency=50us"


def test_a_ring_pays_each_hop_and_the_headers_of_what_it_moves() -> None:
    link = read_link(TEXT, "gloo", 4)
    assert (link.backend, link.num_workers) == ("gloo", 4)
    assert link.latency_s == pytest.approx(6 * 50e-6)
    assert link.seconds_per_byte == pytest.approx(1.5 * 1538 / 1448 * 8 / 10e9)
    assert kind_of(link) == "null"
    assert round(HEADERS, 4) == 1.0622


def test_a_server_pays_two_hops_and_a_backend_without_algorithm_counts_as_a_ring() -> None:
    server = read_link(f"{TEXT},headers=1", "zmq-ps:servers=dedicated:2", 4)
    assert server.latency_s == pytest.approx(2 * 50e-6)
    assert server.seconds_per_byte == pytest.approx(2 * 8 / 10e9)
    ring = read_link(f"{TEXT},headers=1", "mpi-ring", 4)
    assert read_link(f"{TEXT},headers=1", "none", 4).latency_s == ring.latency_s
    assert read_link(TEXT, "gloo", 1).time_s(1e6) == 0.0


def test_a_link_with_colocated_servers_is_converted_to_dedicated_ones() -> None:
    beside = Link(backend="zmq-ps", num_workers=4, latency_s=2e-4, seconds_per_byte=1.5e-9)
    for servers, transfers in ((1, 4.0), (2, 2.0), (4, 1.0), (8, 1.0)):
        backend = f"zmq-ps:servers=dedicated:{servers}"
        link = link_among(beside, 4, backend)
        # 2 (n - 1) / n = 1.5 with a server beside every worker, max(1, n / S) with dedicated ones.
        assert link.seconds_per_byte == pytest.approx(transfers * 1e-9)
        assert (link.backend, link.num_workers) == (backend, 4)
    assert link_among(beside, 4, "zmq-ps:slice_kib=64").seconds_per_byte == 1.5e-9
    assert link_among(beside, 4, "gloo") == beside  # another backend's link is taken as it is
    at_8 = link_among(beside, 8, "zmq-ps:servers=dedicated:2")
    assert at_8.seconds_per_byte == pytest.approx(4e-9)
    assert at_8.num_workers == 8


def test_the_numbers_may_say_backend_and_workers_themselves() -> None:
    link = read_link(f"{TEXT},workers=8,backend=zmq-ps")
    assert (link.backend, link.num_workers) == ("zmq-ps", 8)
    with pytest.raises(UsageError, match="does not say among how many workers; add workers=4"):
        read_link(TEXT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rate=10gbit", "without latency; expected rate=10gbit,latency=50us"),
        ("latency=50us", "without rate; expected"),
        ("rate=10,latency=50us", "rate is '10'; expected bits per second such as 10gbit"),
        ("rate=0gbit,latency=50us", "rate is '0gbit'; expected one above 0"),
        ("rate=10gbit,latency=soon", "duration is 'soon'; expected seconds such as"),
        (f"{TEXT},workers=0", "workers is 0; expected 1 or more"),
        (f"{TEXT},headers=0.5", "headers is 0.5; expected bytes on the wire over bytes of payload"),
        (f"{TEXT},speed=3", "no option 'speed'; known options: backend, headers, latency"),
        (f"{TEXT},fast", "'fast' of 'link' is not key=value"),
    ],
)
def test_what_cannot_be_a_link_is_told_in_plain_words(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_nominal(text)
    with pytest.raises(TestbedError, match=words):
        check_inputs(RunConfig(link=text), 2)


def test_a_file_is_still_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rate=10gbit.json"
    save_link(LINK_A, path)
    assert read_link(path) == LINK_A
    assert kind_of(read_link(str(path))) == "held-out"
    check_inputs(RunConfig(link=TEXT), 2)


def test_a_simulation_needs_no_file_of_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"trace": "resnet50-v100", "scheduler": "sequential,wfbp", "json": "-"}
    simulate(link=TEXT, workers="4,8", **given)
    both = json.loads(capsys.readouterr().out)["results"]
    simulate(link=f"{TEXT},workers=8", **given)
    alone = json.loads(capsys.readouterr().out)
    assert alone["prediction"] == "null"
    simulate(**{**given, "json": None}, link=TEXT, workers="4,8")
    told = capsys.readouterr().out
    assert "are null (nominal rate and latency)" in told
    of_8 = [r["iteration_s"] for r in both if r["num_workers"] == 8]
    assert of_8 == pytest.approx([r["iteration_s"] for r in alone["results"]])
    assert len(both) == 4
