"""`--timeline`: times that are true on one clock, the same training, and sums that agree."""

from __future__ import annotations

import bisect
import json
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from testbed.launch import processes
from testbed.launch.job import start_ranks
from testbed.noise.steady import steady_steps
from testbed.records.timeline import Timeline, decode_timeline
from tests.harness.browser import drive
from tests.harness.runs import FAULTY, testbed

AHEAD_S, DRIFT = 0.05, 50e-6
WORK = ("--workload", "digits-mlp", "--steps", "14", "--warmup", "4", "--verify-steps", "3")
WAYS = {
    "loopback": (),
    "mpi-ring": ("--scheduler", "dear"),
    "gloo": ("--compressor", "ef+topk:ratio=0.1", "--scheduler", "bucket:mib=0.05"),
    "zmq-ps": ("--scheduler", "bytescheduler"),
    "zmq-ps:servers=dedicated:1": (),
    "ddp": ("--accumulate", "2"),
}


def read(path: Path) -> Timeline:
    return decode_timeline(path.read_bytes(), str(path))


@pytest.mark.parametrize("backend", ["gloo", "zmq-ps"])
def test_a_clock_that_is_ahead_and_drifts_is_aligned_while_both_ranks_train(
    backend: str, tmp_path: Path
) -> None:
    truth, file = tmp_path / "truth.json", tmp_path / "t.json"
    words = (AHEAD_S, DRIFT, truth, file, backend, 150)
    command = [sys.executable, "-m", "tests.harness.skewed_rank", *map(str, words)]
    ranks = start_ranks(command, 2, 1, {**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert [rank.wait(100) for rank in ranks] == [0, 0]
    finally:
        processes.end_all(ranks)
    timeline = read(file)
    clock = next(clock for clock in timeline.clocks if clock.rank == 1)
    assert clock.num_bursts >= 10
    assert clock.offset_s == pytest.approx(AHEAD_S, abs=5e-3)  # it drifts on until it is asked
    begin_s, readings = msgspec.json.decode(truth.read_bytes(), type=tuple[float, list[float]])
    readings.sort()
    mine = [event for event in timeline.events if event.rank == 1]
    assert {"compute", "ready", "queued", "send", "wait", "update", "step"} <= {
        event.kind for event in mine
    }
    worst_s = 0.0
    for event in mine:
        for aligned_s in (event.begin_s, event.end_s):
            on_zero_s = aligned_s + timeline.zero_s
            shown_s = (on_zero_s + clock.offset_s - clock.drift * clock.at_s) / (1 - clock.drift)
            true_s = (shown_s - AHEAD_S + DRIFT * begin_s) / (1 + DRIFT)
            place = bisect.bisect(readings, true_s)
            near_s = min(abs(true_s - each) for each in readings[max(0, place - 1) : place + 1])
            assert near_s < 1e-6, "it read its clock at another moment"
            worst_s = max(worst_s, abs(on_zero_s - true_s))
    assert worst_s < 1e-4
    assert worst_s <= clock.uncertainty_s


@pytest.mark.parametrize("backend", WAYS)
def test_training_is_bit_equal_and_waiting_sums_to_what_the_cell_says(
    backend: str, tmp_path: Path
) -> None:
    plain, recorded, file = (tmp_path / name for name in ("a.json", "b.json", "t.json"))
    run = ("run", *WORK, "--backend", backend, *WAYS[backend])
    for words in (("--json", str(plain)), ("--json", str(recorded), "--timeline", str(file))):
        done = testbed(*run, *words)
        assert done.status == 0, done.err
    assert f"{file}: steps 4 .. 13 of 2 ranks" in done.err
    before, cell = json.loads(plain.read_text()), json.loads(recorded.read_text())
    assert cell["status"] == before["status"] == "ok"
    for same in ("initial_digest", "final_digest", "sample_digest", "final_loss", "identical_work"):
        assert cell[same] == before[same], same
    assert cell["samples"]["loss"] == before["samples"]["loss"]
    assert cell["wire_bytes_per_step"] == before["wire_bytes_per_step"]
    exposed_s = waits_of(json.loads(file.read_text()))
    said = cell["samples"]["exposed_comm_s"]
    assert [exposed_s[step] for step in range(4, 14)] == pytest.approx(said, rel=0.01, abs=2e-7)
    samples = cell["samples"]
    taken = [a + b for a, b in zip(samples["cores_stolen"], samples["cores_outside"], strict=True)]
    chosen = steady_steps([exposed_s[step] for step in range(4, 14)], taken, samples["unsteady"])
    assert statistics.median(chosen) == pytest.approx(cell["exposed_comm_s"], rel=0.01)
    assert_is_whole(read(file), cell)


@pytest.mark.parametrize(
    ("backend", "workload"),
    [("ddp", "digits-mlp"), ("ddp:hook=fp16", "digits-mlp"), ("ddp", f"{FAULTY}:build:norm=1")],
)
def test_recording_ddp_for_long_does_not_stand_still(
    backend: str, workload: str, tmp_path: Path
) -> None:
    """Gloo's threads and the one that trains never wait for each other: a race, in any step."""
    file = tmp_path / "t.json"
    done = testbed(
        *("run", "--workload", workload, "--backend", backend, "--timeline", str(file)),
        *("--steps", "600", "--warmup", "4", "--verify-steps", "0"),
    )
    assert done.status == 0, done.err
    assert {event.step for event in read(file).events if event.kind == "send"} == set(range(4, 600))


def waits_of(raw: dict[str, Any]) -> dict[int, float]:
    """Seconds that rank 0 waited in each step, from the trace as any viewer reads it."""
    waited_s: dict[int, float] = defaultdict(float)
    steps = [e for e in raw["traceEvents"] if e.get("cat") == "step" and e["pid"] == 0]
    for event in raw["traceEvents"]:
        if event.get("cat") == "wait" and event["pid"] == 0:
            (within,) = (s for s in steps if s["ts"] <= event["ts"] <= s["ts"] + s["dur"])
            waited_s[int(within["name"].split()[-1])] += event["dur"] / 1e6
    return waited_s


def assert_is_whole(timeline: Timeline, cell: dict[str, Any]) -> None:
    """Each rank computes, exchanges and updates in each step, and messages have their numbers."""
    assert timeline.dropped == 0
    steps = set(timeline.exposed_s)
    assert steps == set(range(4, 14))
    done = defaultdict(set)
    for event in timeline.events:
        done[event.rank, event.kind].add(event.step)
        assert event.begin_s <= event.end_s
    for rank in range(2):
        for kind in ("step", "compute", "ready", "queued", "send", "wait", "update"):
            assert done[rank, kind] == steps, (rank, kind)
        sent = [e for e in timeline.events if e.rank == rank and e.kind == "send"]
        assert all(event.message >= 0 and event.num_bytes > 0 for event in sent)
    if timeline.plan is not None:
        assert timeline.plan.scheduler == cell["scheduler"]
        messages = {event.message for event in timeline.events if event.kind == "send"}
        assert messages == set(range(len(timeline.plan.messages)))
    for server in range(timeline.num_servers):
        for kind in ("receive", "reduce", "send"):
            assert done[2 + server, kind] == steps
    if cell["compression"] is not None:
        assert done[0, "encode"] == done[0, "decode"] == steps


def test_it_opens_in_speedscope_without_an_error(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    done = testbed("run", *WORK, "--backend", "zmq-ps", "--timeline", str(file))
    assert done.status == 0, done.err
    found = drive("speedscope.mjs", file)
    assert found["errors"] == []
    for lane in ("rank 0 (pid 0), compute", "rank 1 (pid 1), communication 0", "server 1 (pid 3)"):
        assert lane in found["text"]
    steps = [e for e in read(file).events if e.kind == "step" and e.rank == 0]
    line = next(line for line in found["text"].splitlines() if "\trank 0 (pid 0), steps" in line)
    shown, unit = line.split("\t")[-1][:-2], line[-2:]
    assert unit == "ms", line
    assert float(shown) == pytest.approx(1e3 * sum(e.duration_s for e in steps), rel=0.001)


def test_a_run_whose_rank_is_killed_leaves_no_timeline(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    done = testbed(
        *("run", "--workload", f"{FAULTY}:build:fault=kill,rank=1,at=8", "--backend", "gloo"),
        *("--steps", "14", "--timeline", str(file), "--deadline", "4"),
    )
    assert done.status == 1, done.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = testbed("run", "--backend", "loopback", "--timeline", str(tmp_path / "no" / "t.json"))
    assert done.status == 2
    assert "--timeline" in done.err


def test_a_timeline_that_cannot_be_written_costs_no_record(tmp_path: Path) -> None:
    record, file = tmp_path / "cell.json", tmp_path / ("x" * 300 + ".json")
    done = testbed(
        *("run", "--backend", "loopback", "--workload", "digits-mlp", "--steps", "8"),
        *("--json", str(record), "--timeline", str(file)),
    )
    assert done.status == 0, done.err
    assert "give another file to --timeline" in done.err
    assert json.loads(record.read_text())["steps"] == 8
