"""Whatever happens to a rank, the run ends soon, says who, what and where, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from testbed.forking import through_stub
from tests.harness.family import belongs, descendants
from tests.harness.runs import FAULTY, WITHIN_S, end_family, testbed, wait_for

DEADLINE_S = "4"
NETWORKED = ["zmq-ps", "mpi-ring", "mpi", "gloo"]
FAULTS = ["kill", "raise", "stop", "hang"]
# One fault of each kind on each backend would take minutes: the default suite holds every backend
# and every fault once, `pytest -m slow` all pairs.
QUICK = {("zmq-ps", "kill"), ("mpi-ring", "raise"), ("mpi", "stop"), ("gloo", "hang")}
PAIRS = [
    pytest.param(b, f, marks=[] if (b, f) in QUICK else [pytest.mark.slow])
    for b in NETWORKED
    for f in FAULTS
]


@pytest.mark.parametrize(("backend", "fault"), PAIRS)
def test_a_fault_on_one_rank_ends_the_run(backend: str, fault: str, tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    before = shared_memory_files()
    done = testbed(
        "run",
        *("--workload", f"{FAULTY}:build:fault={fault},rank=1,at=3"),
        *("--backend", backend, "--workers", "2", "--steps", "20", "--verify-steps", "0"),
        *("--deadline", DEADLINE_S, "--json", str(record)),
    )
    assert done.status == 1, done.err
    assert "rank 1" in done.err
    if fault == "kill":
        ended = "rank 1(, the first to end,)? (was ended by SIGKILL|exited with status 137)"
        assert re.search(ended, done.err)
    if fault == "raise":
        assert "the model is broken on purpose" in done.err
    if fault in ("stop", "hang"):
        assert "step 3" in done.err
        assert "exchange of" in done.err or "all-reduce of" in done.err, done.err
    assert json.loads(record.read_text())["status"] == "failed"
    assert not leftovers(str(record))
    assert not shared_memory_files() - before


@pytest.mark.parametrize(
    ("fault", "backend"),
    [
        ("kill", "ddp"),
        ("stop", "ddp"),
        ("hang", "ddp"),
        ("kill", "ddp:hook=fp16"),
        ("kill", "ddp:hook=powersgd,start=2"),
        pytest.param("hang", "ddp:hook=fp16", marks=pytest.mark.slow),
        pytest.param("hang", "ddp:hook=powersgd,start=2", marks=pytest.mark.slow),
        pytest.param("kill", "ddp:static_graph=1", marks=pytest.mark.slow),
    ],
)
def test_under_a_framework_of_its_own_survivors_name_who_is_missing(
    fault: str, backend: str, tmp_path: Path
) -> None:
    """DDP waits inside torch; the deadline and the naming are those of every other backend."""
    note, record = tmp_path / "fault", tmp_path / "cell.json"
    workload = f"{FAULTY}:build:fault={fault},rank=1,at=3,note={note}"
    command = [sys.executable, "-m", "testbed", "run", "--workload", workload, "--backend", backend]
    command += ["--workers", "3", "--steps", "20", "--verify-steps", "0", "--deadline", DEADLINE_S]
    said: dict[int, tuple[float, str]] = {}
    with subprocess.Popen(
        [*command, "--json", str(record)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if (match := re.match(r"testbed: rank (\d)", line)) is not None:
                said.setdefault(int(match[1]), (time.time(), line))
    committed_s = float(note.read_text())
    for survivor in (0, 2):
        at_s, line = said[survivor]
        assert at_s - committed_s < float(DEADLINE_S) + 2
        assert "rank 1 (host" in line
        assert "exchange of gradients in step 3" in line
    assert process.returncode == 1
    assert not leftovers(str(record))


def test_nan_names_tensor_and_step() -> None:
    done = testbed(
        *("run", "--workload", f"{FAULTY}:build:fault=nan,rank=0,at=2", "--backend", "gloo"),
        *("--workers", "2", "--steps", "20", "--verify-steps", "0", "--deadline", DEADLINE_S),
    )
    assert done.status == 1
    assert "NonFiniteGradient" in done.err
    assert "0.weight" in done.err
    assert "step 2" in done.err


@pytest.mark.parametrize(
    ("fault", "kind"), [("nan", "NonFiniteGradient"), ("raise", "RuntimeError")]
)
def test_of_ranks_that_are_threads_the_failed_one_is_named(fault: str, kind: str) -> None:
    run = ("run", "--workload", f"{FAULTY}:build:fault={fault},rank=0,at=2")
    done = testbed(*run, "--backend", "loopback", "--workers", "2", "--verify-steps", "0")
    assert done.status == 1
    assert kind in done.err
    assert re.search(r"on rank [01]$", done.err, re.MULTILINE)


@pytest.mark.mpi
def test_ctrl_c_of_a_run_with_a_stopped_rank_leaves_nothing(tmp_path: Path) -> None:
    """A stopped rank hears no request to end: it is killed, with its memory still shared."""
    record, before = tmp_path / "cell.json", shared_memory_files()
    fault = f"{FAULTY}:build:fault=stop,rank=1,at=3"
    command = [sys.executable, "-m", "testbed", "run", "--workload", fault, "--backend", "mpi-ring"]
    command += ["--workers", "2", "--steps", "1000", "--verify-steps", "0", "--deadline", "60"]
    with subprocess.Popen(
        [*command, "--json", str(record)], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_for(lambda: psutil.STATUS_STOPPED in statuses(process.pid))
            assert shared_memory_files() - before
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        except BaseException:
            end_family(process.pid)
            raise
    assert process.returncode == 130
    assert "interrupted by SIGINT; ending all ranks" in said
    assert "Traceback" not in said
    assert not leftovers(str(record))
    assert not shared_memory_files() - before


def test_ctrl_c_ends_ranks_that_are_threads(tmp_path: Path) -> None:
    marks = tmp_path / "checkpoints"
    command = [sys.executable, "-m", "testbed", "run", "--workload", "digits-mlp"]
    command += ["--backend", "loopback", "--steps", "1000000", "--verify-steps", "0"]
    command += ["--checkpoint", str(marks), "--every", "1"]
    command = through_stub(command, os.environ, [])
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: marks.is_dir() and any(marks.iterdir()))
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        except BaseException:
            end_family(process.pid)
            raise
    assert process.returncode == 130
    assert "interrupted by SIGINT; ending all ranks" in said
    assert "Traceback" not in said


def test_a_job_that_is_paused_as_a_whole_goes_on(tmp_path: Path) -> None:
    """Slurm, a container's freezer or a virtual machine's host stop all ranks for a while."""
    marks = tmp_path / "checkpoints"
    command = [sys.executable, "-m", "testbed", "run", "--workload", "digits-mlp", "--quiet"]
    command += ["--backend", "zmq-ps", "--workers", "3", "--steps", "300", "--verify-steps", "0"]
    command += ["--checkpoint", str(marks), "--every", "10"]
    command = through_stub(command, os.environ, [])
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: marks.is_dir() and any(marks.iterdir()))
            ranks = [m for m in descendants() if belongs(m, frozenset({process.pid}))]
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                for member in ranks:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(member, signum)
                if signum == signal.SIGSTOP:
                    time.sleep(7.0)  # longer than a member may be silent, shorter than --deadline
            _, said = process.communicate(timeout=60)
        except BaseException:
            end_family(process.pid)
            raise
    assert process.returncode == 0, said


def test_a_record_is_kept_when_what_follows_it_fails(tmp_path: Path) -> None:
    """As by `testbed run --json cell.json | less`, left before the end."""
    record = tmp_path / "cell.json"
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "testbed", "run", "--workload", "digits-mlp", "--quiet"]
    command += ["--backend", "gloo", "--workers", "2", "--steps", "10", "--json", str(record)]
    try:
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=WITHIN_S
        )
    finally:
        os.close(writing)
    assert done.returncode == 1
    assert f"{record} is kept" in done.stderr
    assert json.loads(record.read_text())["status"] == "ok"


def statuses(pid: int) -> list[str]:
    """Of what a process started, and of what was forked for it."""
    found = []
    for member in descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            if belongs(member, frozenset({pid})):
                found.append(psutil.Process(member).status())
    return found


def shared_memory_files() -> set[str]:
    folder = Path("/dev/shm")
    return set(os.listdir(folder)) if folder.is_dir() else set()


def leftovers(word: str) -> list[str]:
    """Processes whose command line still holds a word that only this test's run had."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if word in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found
