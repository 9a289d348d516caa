"""Links of emulated clusters, measured: what shapers let through, what a relay delays."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from testbed.cluster.relay import TUN
from testbed.cluster.system import NETNS_FOLDER, lacking
from testbed.cluster.topology import burst_bytes
from tests.harness.runs import answer, testbed
from tests.integration.test_cluster import (
    HARNESS,
    HEADERS,
    WITHIN_S,
    as_root,
    ours,
    sleeping_cluster,
    stream,
)

PORT = 7001
PAUSES = str(HARNESS / "pauses.py")
RELAYED = "nodes=2,rate=10gbit,dilation=40,latency=1ms,latency_by=relay"
RELAYED_BPS, RELAYED_S = 250e6, 40e-3  # one way, real

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
]
with_cards = pytest.mark.skipif(
    not os.access(TUN, os.R_OK | os.W_OK), reason=f"{TUN} cannot be opened"
)


def after_pauses(spec: str, repeats: int, sizes: list[int]) -> dict[int, float]:
    """Bytes of a message from node 1 to node 2 -> least seconds until the answer, after pauses."""
    answers = shlex.join([sys.executable, PAUSES, "answer", str(PORT)])
    asks = [sys.executable, PAUSES, "measure", "node2", str(PORT), str(repeats)]
    words = ("sh", str(HARNESS / "answered.sh"), answers, *asks, ",".join(map(str, sizes)))
    done = testbed("cluster", "--spec", spec, "--", *words, within_s=WITHIN_S)
    assert done.status == 0, done.err
    return {int(size): least_s for size, least_s in json.loads(done.out).items()}


@pytest.mark.parametrize("mbit", [100, 250, 1000])
def test_after_a_pause_a_message_takes_the_time_of_its_bytes(mbit: int) -> None:
    """As ratios to the link's own rate: the slope over sizes, and what went through for nothing."""
    s_per_byte = 8 * HEADERS / (mbit * 1e6)
    sizes = [1, *(1 << k for k in range(14, 19))]
    # Processes that come and go beside this test delay those of SCHED_BATCH by milliseconds.
    spec = f"nodes=2,rate={mbit}mbit,cpu_policy=other,cores=shared"
    least_s = after_pauses(spec, 25, sizes)
    slope, _ = np.polyfit(sizes[1:], [least_s[size] for size in sizes[1:]], 1)
    assert 0.8 < slope / s_per_byte < 2  # a busy machine adds time, and takes none away
    free_bytes = [size - (least_s[size] - least_s[1]) / s_per_byte for size in sizes[1:]]
    assert max(free_bytes) < 0.5 * burst_bytes(mbit * 1e6, "tbf")


@with_cards
def test_a_relay_delays_every_packet_and_keeps_the_rate() -> None:
    large = 1 << 20
    least_s = after_pauses(RELAYED, 7, [1, large])
    assert 2 * RELAYED_S <= least_s[1] < 1.25 * 2 * RELAYED_S
    rate = 8 * HEADERS * large / (least_s[large] - least_s[1]) / RELAYED_BPS
    assert 0.6 < rate < 1.1


@with_cards
def test_jitter_is_of_each_packet() -> None:
    """Of several round trips the least is below the latency, which without jitter none can be."""
    least_s = after_pauses(f"{RELAYED},jitter=1ms", 15, [1])
    assert least_s[1] < 2 * RELAYED_S


@with_cards
@pytest.mark.slow
def test_throughput_holds_while_many_packets_are_on_their_way() -> None:
    command = stream(1, 2, round(RELAYED_BPS / 8 * 2))  # two seconds' worth
    done = testbed("cluster", "--spec", RELAYED, "--", *command, within_s=WITHIN_S)
    assert done.status == 0, done.err
    assert 0.7 < float(done.out) * HEADERS / RELAYED_BPS < 1.05


@with_cards
@as_root
def test_a_relay_ends_with_its_owner_however_that_ends() -> None:
    with sleeping_cluster("--spec", RELAYED) as victim:
        (switch,) = [name for name in ours(victim.pid) if name.endswith("switch")]
        inside = subprocess.run(
            ("ip", "netns", "pids", switch), capture_output=True, text=True, check=True
        )
        (relay,) = inside.stdout.split()
        assert b"testbed.cluster.relay" in Path(f"/proc/{relay}/cmdline").read_bytes()
        victim.send_signal(signal.SIGKILL)
        victim.wait(WITHIN_S)
        deadline_s = time.monotonic() + WITHIN_S
        while Path(f"/proc/{relay}").exists():
            assert time.monotonic() < deadline_s, "the relay outlives its owner"
    assert testbed("cluster", "--nodes", "1", "--", "true").status == 0
    assert not ours(victim.pid)
    assert not (NETNS_FOLDER / switch).exists()


@with_cards
@as_root
def test_a_relay_that_is_killed_fails_the_run() -> None:
    """Nothing that was measured on a network that was gone may look like a result."""
    with sleeping_cluster("--spec", RELAYED) as owner:
        (switch,) = [name for name in ours(owner.pid) if name.endswith("switch")]
        subprocess.run(
            ("sh", "-c", f"kill -KILL $(ip netns pids {switch})"), check=True, timeout=WITHIN_S
        )
        assert owner.wait(WITHIN_S) == 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dilation=10,latency=1ms,latency_by=relay", "write dilation=40"),
        (f"{RELAYED},change=1s:all:1gbit", "leave out one of the two"),
        (f"{RELAYED},loss=1%", "loss needs netem"),
    ],
)
def test_what_a_relay_cannot_do_is_refused_with_what_to_write(spec: str, words: str) -> None:
    done = answer("cluster", "--spec", spec, "--", "true")
    assert done.status == 2
    assert words in done.err


@with_cards
def test_the_record_tells_what_the_relay_took(tmp_path: Path) -> None:
    show = 'cat "$(dirname "$TESTBED_CLUSTER")/relay.json" "$TESTBED_CLUSTER"'
    done = testbed("cluster", "--spec", RELAYED, "--", "sh", "-c", show)
    assert done.status == 0, done.err
    state, end = json.JSONDecoder().raw_decode(done.out)
    facts = json.loads(done.out[end:])
    assert state["processor_s"] > 0
    assert state["policy"] == "fifo" or os.geteuid() != 0
    assert (facts["record"]["latency"], facts["record"]["shaper"]) == ("relay", "relay")
    assert facts["latency_s"] == 0  # nothing waits but packets
