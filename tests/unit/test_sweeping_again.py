"""Runs that a virtual machine's host disturbed are run again; stolen time alone decides."""

import io
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from testbed.config import RunConfig
from testbed.records.cell import Cell, decode_cell
from testbed.records.store import Store, cell_key, create_store
from testbed.reporting.collect import collect_cells
from testbed.sweeping.executor import failed_cell
from testbed.sweeping.grid import Sweep
from testbed.sweeping.run import begin, carry_out, make_plan
from tests.unit.test_sweeping_store import NOW, POINTS, finish_at_once

ROOT = Path(__file__).parents[2]
SWEEP = Sweep("tiny", tuple(RunConfig(workers=w) for w in (1, 2, 3, 4)), repeats=1, again=2)

# Ends itself (SIGKILL) when the given point is passed for the given time.
CHILD = """
import os, signal, sys
from pathlib import Path
from tests.unit.test_sweeping_again import SWEEP, Host
from testbed.records.store import Store
from testbed.sweeping.run import carry_out, make_plan

folder, wanted, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
passed = 0
def at(point):
    global passed
    passed += point == wanted
    if passed == times:
        os.kill(os.getpid(), signal.SIGKILL)
store = Store(folder, at)
store.write_plan(make_plan(SWEEP))
sys.exit(carry_out(store, Host({2: [0.3, 0.1], 3: [0.2, 0.4]})))
"""


class Host:
    """A runner on a machine whose host takes these shares, by workers, run after run."""

    def __init__(self, stolen, failing=()):
        self.stolen, self.failing, self.ran = stolen, failing, []

    def __call__(self, config, json_path, log_path):
        self.ran.append(config.workers)
        number = self.ran.count(config.workers)
        if (config.workers, number) in self.failing:
            return failed_cell(config, "it broke")
        shares = self.stolen.get(config.workers, ())
        stolen = shares[number - 1] if number <= len(shares) else 0.0
        cell = finish_at_once(config, json_path, log_path)
        return msgspec.structs.replace(cell, cores_stolen=stolen, steps=number)


def new_store(path, again=2):
    sweep = Sweep("tiny", SWEEP.cells, repeats=1, again=again)
    return begin(make_plan(sweep), path / "store")


def run(store, host):
    out = io.StringIO()
    status = carry_out(store, host, out)
    return status, out.getvalue()


def kept(store):
    """Workers -> (which run counts, what the host took of it)."""
    cells = [decode_cell(f.read_bytes()) for f in store.cells.glob("*.json")]
    return {c.num_workers: (c.steps, c.cores_stolen) for c in cells}


def test_the_most_disturbed_are_run_again_and_the_quieter_run_counts(tmp_path):
    store = new_store(tmp_path)
    host = Host({1: [0.05, 0.0], 2: [0.3, 0.1], 3: [0.2, 0.4], 4: [0.02]})
    status, said = run(store, host)
    assert status == 0
    assert host.ran[4:] == [2, 3]  # the worst first, and no more than two
    assert "2 runs again" in said
    assert kept(store) == {1: (1, 0.05), 2: (2, 0.1), 3: (1, 0.2), 4: (1, 0.02)}
    both = {cells[0].num_workers: [c.cores_stolen for c in cells] for cells in again(store)}
    assert both == {2: [0.3, 0.1], 3: [0.2, 0.4]}
    notes = collect_cells([store.path]).notes
    assert [note for note in notes if note.startswith(f"2 runs of {store.path} were run again")]


def again(store):
    return list(store.repeated().values())


def test_nothing_is_run_again_on_a_quiet_machine_or_unasked(tmp_path):
    quiet = new_store(tmp_path)
    assert len(run_and_count(quiet, {1: [0.02]})) == 4
    assert not quiet.again.exists()
    assert collect_cells([quiet.path]).notes == ()
    unasked = begin(make_plan(Sweep("tiny", SWEEP.cells, repeats=1)), tmp_path / "unasked")
    assert len(run_and_count(unasked, {1: [0.5]})) == 4


def run_and_count(store, stolen):
    host = Host(stolen)
    assert run(store, host)[0] == 0
    return host.ran


def test_a_second_run_that_fails_leaves_the_first(tmp_path):
    store = new_store(tmp_path)
    status, said = run(store, Host({2: [0.3]}, failing={(2, 2)}))
    assert status == 0
    assert "it broke" in said
    assert kept(store)[2] == (1, 0.3)
    assert [cell.status for cell in again(store)[0]] == ["ok", "failed"]


def test_a_failed_run_is_no_candidate(tmp_path):
    store = new_store(tmp_path)
    host = Host({2: [0.3]}, failing={(2, 1)})
    assert run(store, host)[0] == 1
    assert len(host.ran) == 4


def test_resumed_it_repeats_no_run_twice(tmp_path):
    store = new_store(tmp_path)
    run(store, Host({2: [0.3, 0.2]}))
    assert run_and_count(store, {}) == []


@pytest.mark.parametrize("times", [1, 6, 7, 8, 9])
@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere_then_resumed(tmp_path, point, times):
    store = create_store("tiny", NOW, tmp_path / "store")
    command = [sys.executable, "-c", CHILD, str(store.path), point, str(times)]
    ended = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    if not (store.path / "sweep.json").exists():  # before the plan was there: nothing ran
        return
    before = {key: cells[0].cores_stolen for key, cells in store.repeated().items()}
    assert carry_out(store, Host({2: [0.3, 0.1], 3: [0.2, 0.4]}), io.StringIO()) == 0
    assert store.finished() == {cell_key(config) for config in SWEEP.cells}
    for key, (first, second) in store.repeated().items():
        assert first.cores_stolen == before.get(key, first.cores_stolen)  # no first run was lost
        counting = decode_cell((store.cells / f"{key}.json").read_bytes())
        assert counting.cores_stolen == min(first.cores_stolen, second.cores_stolen)
    assert not list(store.path.rglob("*.partial"))


def test_the_plan_keeps_how_many(tmp_path):
    store = Store(new_store(tmp_path, again=7).path)
    assert store.read_plan().again == 7
    assert isinstance(finish_at_once(RunConfig(), None, None), Cell)
