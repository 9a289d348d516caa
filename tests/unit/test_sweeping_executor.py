"""Cells in processes of their own: their ends, their limits, and nothing left behind."""

import io
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from testbed.base.config import RunConfig
from testbed.records.cell import Cell, decode_cell
from testbed.records.store import Store
from testbed.sweeping.executor import ProcessRunner, run_command
from testbed.sweeping.grid import Sweep
from testbed.sweeping.run import INTERRUPTED, begin, carry_out, make_plan

WRITES_A_CELL = """
import sys
from pathlib import Path
from testbed.base.config import RunConfig
from testbed.records.cell import Cell, StepSamples, encode_cell
print("hello from the cell")
config = RunConfig(workers=2, steps=20)
cell = Cell(backend="gloo", workload="digits-cnn", num_workers=2, config=config,
            status=sys.argv[2], error=sys.argv[3], step_time_s=0.5, samples_per_s=64.0,
            time_to_accuracy_s={"0.9": 5.0}, samples=StepSamples(step_time_s=[0.5]),
            cluster={"spec": "nodes=2"}, dilation=2.0, environment={"commit": "c0"},
            command="testbed run")
Path(sys.argv[1]).write_bytes(encode_cell(cell))
sys.exit(int(sys.argv[4]))
"""

# Tells its own number and that of a grandchild in a session of its own, then stays; both ignore
# SIGTERM, as a rank that hangs in native code does.
STAYS = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stay = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); " \\
       "signal.pause()"
child = subprocess.Popen([sys.executable, "-c", stay], start_new_session=True,
                         stdout=subprocess.PIPE)
child.stdout.readline()
with open(sys.argv[1], "w") as fifo:
    fifo.write(f"{os.getpid()} {child.pid}")
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
signal.pause()
"""

# Sweeps one cell that stays; the test ends it.
SWEEPS = """
import sys
from pathlib import Path
from testbed.records.store import Store
from testbed.sweeping.executor import ProcessRunner
from testbed.sweeping.run import carry_out
from tests.unit.test_sweeping_executor import STAYS
command = lambda config, json_path: [sys.executable, "-c", STAYS, sys.argv[2]]
sys.exit(carry_out(Store(Path(sys.argv[1])), ProcessRunner(command, grace_s=0.2)))
"""

ROOT = Path(__file__).parents[2]
CONFIG = RunConfig(backend="gloo", workers=2, repeat=1)


def runs(program, *arguments, **options):
    def command(config, json_path):
        given = [str(json_path) if a is Path else a for a in arguments]
        return [sys.executable, "-c", program, *given]

    return ProcessRunner(command, **options)


def run_in(tmp_path, runner):
    return runner(CONFIG, tmp_path / "c.json", tmp_path / "c.log")


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def told(fifo):
    """The processes that tell their numbers through a FIFO; waits until they do."""
    return [psutil.Process(int(pid)) for pid in fifo.read_text().split()]


def assert_gone(processes):
    gone, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
    assert len(gone) == len(processes)


def test_a_finished_cell_comes_back_with_its_repeat_and_log(tmp_path):
    cell = run_in(tmp_path, runs(WRITES_A_CELL, Path, "ok", "", "0"))
    assert cell.status == "ok"
    assert cell.config == RunConfig(workers=2, steps=20, repeat=1)
    assert (tmp_path / "c.log").read_text() == "hello from the cell\n"


def test_a_run_that_reports_its_failure_is_believed(tmp_path):
    cell = run_in(tmp_path, runs(WRITES_A_CELL, Path, "failed", "RankLost: rank 1", "1"))
    assert (cell.status, cell.error) == ("failed", "RankLost: rank 1")


def test_a_result_with_a_bad_exit_status_is_a_failure(tmp_path):
    cell = run_in(tmp_path, runs(WRITES_A_CELL, Path, "ok", "", "3"))
    assert cell.status == "failed"
    assert cell.error.startswith("exit status 3\nhello")
    assert cell == Cell(
        status="failed",
        backend="gloo",
        workload="digits-cnn",
        num_workers=2,
        config=RunConfig(workers=2, steps=20, repeat=1),
        cluster={"spec": "nodes=2"},
        dilation=2.0,
        environment={"commit": "c0"},
        command="testbed run",
        error=cell.error,
    )


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("raise SystemExit('broken')", "exit status 1\nbroken"),
        ("import os; os.kill(os.getpid(), 9)", "exit status 137"),
        ("pass", "it wrote no result"),
        ("import sys; open(sys.argv[1], 'w').write('{')", "its result cannot be read"),
    ],
)
def test_a_run_without_a_result_fails_with_the_end_of_its_log(tmp_path, program, error):
    cell = run_in(tmp_path, runs(program, Path))
    assert cell.status == "failed"
    assert error in cell.error
    assert cell.num_workers == 2
    assert cell.command == "testbed run --workload digits-cnn --backend gloo --workers 2"


def test_a_program_that_does_not_exist_is_a_failed_cell(tmp_path):
    cell = run_in(tmp_path, ProcessRunner(lambda config, path: ["/no/such/program"]))
    assert cell.status == "failed"
    assert "/no/such/program" in cell.error


@pytest.mark.parametrize(
    ("arguments", "options"),
    [(["0"], {}), ([], {"timeout_s": 2.0})],
    ids=["ended by itself", "over its time limit"],
)
def test_nothing_of_a_cell_outlives_it(tmp_path, fifo, arguments, options):
    runner = runs(STAYS, str(fifo), *arguments, grace_s=0.2, **options)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run_in, tmp_path, runner)
        processes = told(fifo)
        cell = ended.result(60)
    assert_gone(processes)
    assert cell.status == "failed"
    assert ("time limit of 2 s" in cell.error) == bool(options)


@pytest.fixture
def hears_hang_ups():
    """Commands hear SIGHUP as from a terminal, also where these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_an_interrupted_sweep_leaves_no_process(tmp_path, fifo, signum, hears_hang_ups):
    store = begin(make_plan(Sweep("one", (CONFIG,), repeats=1)), tmp_path / "store")
    command = [sys.executable, "-c", SWEEPS, str(store.path), str(fifo)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as sweep:
        processes = told(fifo)
        sweep.send_signal(signum)
        _, said = sweep.communicate(timeout=60)
    assert_gone(processes)
    if signum == signal.SIGKILL:
        assert sweep.returncode == -signum
    else:
        assert sweep.returncode == INTERRUPTED, said
        assert f"go on with: testbed sweep --resume {store.path}" in said
    assert store.finished() == set()


def test_a_supervisor_that_is_killed_takes_the_cell_with_it(tmp_path, fifo):
    store = begin(make_plan(Sweep("one", (CONFIG,), repeats=1)), tmp_path / "store")
    command = [sys.executable, "-c", SWEEPS, str(store.path), str(fifo)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as sweep:
        cell, grandchild = told(fifo)
        cell.parent().kill()
        assert_gone([cell])
        grandchild.kill()  # it left the cell's family on purpose; nobody else ends it
        _, said = sweep.communicate(timeout=60)
    assert sweep.returncode == 1, said


def test_progress_is_told_in_plain_lines(tmp_path):
    store = begin(make_plan(Sweep("two", (CONFIG, RunConfig()), repeats=1)), tmp_path / "s")
    out = io.StringIO()
    assert carry_out(Store(store.path), runs(WRITES_A_CELL, Path, "ok", "", "0"), out) == 0
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("[1/2] digits-cnn, ")
    assert "left" in lines[1]
    assert ": ok in" in lines[3]
    assert all(decode_cell(f.read_bytes()).status == "ok" for f in store.cells.glob("*.json"))


def test_the_command_of_a_cell_names_the_hostfile(tmp_path):
    command = run_command(CONFIG, tmp_path / "c.json", tmp_path / "hosts")
    assert command[1:4] == ["-m", "testbed", "run"]
    assert command[-4:] == [
        "--hostfile",
        str(tmp_path / "hosts"),
        "--json",
        str(tmp_path / "c.json"),
    ]


def test_the_command_of_a_cell_puts_its_timeline_beside_its_json(tmp_path):
    command = run_command(CONFIG, tmp_path / "c.json", timeline=True)
    assert command[-2:] == ["--timeline", str(tmp_path / "c.timeline.json")]
