"""A store that is killed at any moment loses nothing and takes nothing half-written as finished."""

import datetime
import errno
import io
import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import write_atomically
from testbed.records import store as store_module
from testbed.records.cell import Cell, decode_cell
from testbed.records.store import Store, cell_key, create_store, newest_store
from testbed.sweeping.executor import failed_cell
from testbed.sweeping.grid import Sweep
from testbed.sweeping.run import begin, carry_out, make_plan, to_hostfile

ROOT = Path(__file__).parents[2]
NOW = datetime.datetime(2025, 1, 2, 3, 4, 5)
POINTS = ("opened", "half-written", "written", "synced", "renamed", "done")
SWEEP = Sweep("tiny", tuple(RunConfig(workers=w) for w in (1, 2, 4)), repeats=2)

# Runs the sweep of the parent test with cells that take no time, and kills itself (SIGKILL) when
# the given point is passed for the given time.
CHILD = """
import os, signal, sys
from pathlib import Path
from tests.unit.test_sweeping_store import SWEEP, finish_at_once
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
def runner(config, json_path, log_path):
    json_path.write_text("half of a cel")
    at("running")
    return finish_at_once(config, json_path, log_path)
sys.exit(carry_out(store, runner))
"""


def finish_at_once(config, json_path, log_path):
    return Cell(
        backend=config.backend, workload=config.workload, num_workers=config.workers, config=config
    )


class Counting:
    """A runner that notes what it was asked to run; those in `failing` fail."""

    def __init__(self, failing=()):
        self.ran, self.failing = [], failing

    def __call__(self, config, json_path, log_path):
        self.ran.append(config)
        if config.workers in self.failing:
            return failed_cell(config, "it broke")
        return finish_at_once(config, json_path, log_path)


def new_store(path):
    return begin(make_plan(SWEEP), path / "store")


def run(store, runner, share=None):
    return carry_out(store, runner, io.StringIO(), share)


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("point", [*POINTS, "running"])
def test_killed_anywhere_then_resumed(tmp_path, point, times):
    store = create_store("tiny", NOW, tmp_path / "store")
    command = [sys.executable, "-c", CHILD, str(store.path), point, str(times)]
    ended = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    for file in store.cells.glob("*.json"):
        decode_cell(file.read_bytes())
    if not (store.path / "sweep.json").exists():  # killed before the plan was there: nothing ran
        with pytest.raises(UsageError, match="no sweep was begun there"):
            run(store, Counting())
        return
    finished = store.finished()
    runner = Counting()
    assert run(store, runner) == 0
    assert {cell_key(config) for config in runner.ran}.isdisjoint(finished)
    assert len(runner.ran) + len(finished) == 6
    assert store.finished() == {key for key, _ in store.read_plan().runs()}
    assert not list(store.path.rglob("*.partial"))
    assert not list(store.scratch.iterdir())


def test_a_finished_sweep_repeats_nothing(tmp_path):
    store = new_store(tmp_path)
    first, second = Counting(), Counting()
    assert run(store, first) == 0
    assert run(store, second) == 0
    assert len(first.ran) == 6
    assert second.ran == []


def test_a_failed_cell_is_recorded_the_sweep_goes_on_and_resume_runs_it_again(tmp_path):
    store = new_store(tmp_path)
    first = Counting(failing={2})
    assert run(store, first) == 1
    assert len(first.ran) == 6
    statuses = [decode_cell(f.read_bytes()).status for f in store.cells.glob("*.json")]
    assert sorted(statuses) == ["failed"] * 2 + ["ok"] * 4
    second = Counting()
    assert run(store, second) == 0
    assert [config.workers for config in second.ran] == [2, 2]


@pytest.mark.parametrize("damage", [b"", b"{", b'{"schema": "other/1"}', b"[]"])
def test_a_damaged_cell_is_run_again(tmp_path, damage):
    store = new_store(tmp_path)
    run(store, Counting())
    victim = next(store.cells.glob("*.json"))
    victim.write_bytes(damage)
    runner = Counting()
    assert run(store, runner) == 0
    assert [cell_key(config) for config in runner.ran] == [victim.stem]


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def break_at(point):
        if point == "written":
            raise OSError(errno.ENOSPC, "disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new", at=break_at)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


def test_two_sweeps_of_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stores = [create_store("tiny", NOW) for _ in range(3)]
    assert [store.path.name for store in stores] == [
        "tiny-20250102-030405",
        "tiny-20250102-030405-2",
        "tiny-20250102-030405-3",
    ]


def test_an_existing_folder_is_never_taken(tmp_path):
    with pytest.raises(UsageError, match="already exists"):
        create_store("tiny", NOW, tmp_path)
    assert not list(tmp_path.iterdir())


def test_newest_store_of_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="nothing to resume"):
        newest_store("tiny")
    other = msgspec.structs.replace(make_plan(SWEEP), name="other")
    stores = [begin(plan, None) for plan in (make_plan(SWEEP), make_plan(SWEEP), other)]
    assert newest_store("tiny") == Store(stores[1].path)
    assert newest_store(None) == Store(stores[2].path)


def test_a_folder_takes_one_sweep_at_a_time(tmp_path):
    store = new_store(tmp_path)

    def intrude(config, json_path, log_path):
        with pytest.raises(UsageError, match="another sweep is at work"):
            run(Store(store.path), finish_at_once)
        return finish_at_once(config, json_path, log_path)

    assert run(store, intrude) == 0


def test_tasks_are_at_work_in_one_folder_each_on_its_own_share(tmp_path):
    store = begin(msgspec.structs.replace(make_plan(SWEEP), tasks=2), tmp_path / "store")
    others = Counting()

    def beside(config, json_path, log_path):
        json_path.write_text("half of a cel")
        if not others.ran:
            assert run(Store(store.path), others, share=1) == 0
        assert json_path.read_text() == "half of a cel"
        for share in (0, None):
            with pytest.raises(UsageError, match="another sweep is at work"):
                run(Store(store.path), finish_at_once, share)
        return finish_at_once(config, json_path, log_path)

    assert run(store, beside, share=0) == 0
    own, theirs = (dict(store.read_plan().runs(share)) for share in (0, 1))
    assert list(theirs) == [cell_key(config) for config in others.ran]
    assert (len(own), len(theirs)) == (3, 3)
    assert store.finished() == own.keys() | theirs.keys()
    assert run(store, again := Counting()) == 0
    assert again.ran == []


def test_what_is_run_is_in_the_plan_that_is_there_once_the_lock_is_held(tmp_path, monkeypatch):
    store, locked = new_store(tmp_path), Store.locked

    @contextmanager
    def planned_anew(self, share=None):
        """As if another command had held the lock just before."""
        self.write_plan(make_plan(Sweep("tiny", SWEEP.cells[:1], repeats=1)))
        with locked(self, share):
            yield

    monkeypatch.setattr(Store, "locked", planned_anew)
    runner = Counting()
    assert run(store, runner) == 0
    assert runner.ran == list(SWEEP.cells[:1])


def test_a_share_that_is_none_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--share is 1; expected one of 0 \.\. 0"):
        run(new_store(tmp_path), finish_at_once, share=1)


def test_plan_is_readable_and_its_hosts_reach_the_cells(tmp_path):
    hosts = to_hostfile([("h1", 2), ("h2", 4)])
    store = begin(make_plan(SWEEP, hosts), tmp_path / "s")
    assert carry_out(store, Counting(), io.StringIO()) == 0
    plan = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert plan["schema"] == "testbed.sweep/1"
    assert len(plan["order"]) == 6
    assert (tmp_path / "s" / "hostfile").read_text() == "h1 slots=2\nh2 slots=4\n"


def test_keys_differ_for_every_setting():
    configs = [RunConfig(), RunConfig(workers=3), RunConfig(seed=2), RunConfig(repeat=1)]
    assert len({cell_key(config) for config in configs}) == len(configs)


@pytest.mark.parametrize(
    "folder",
    [
        "other-traces",
        "compressors/table",
        "compressors/break-evens",
        "unseen",
        "published/emulated",
    ],
)
def test_committed_records_keep_their_names(folder: str) -> None:
    plan = Store(Path(__file__).parent.parent.parent / "runs" / folder).read_plan()
    assert [key for key, _ in plan.runs()] == [cell_key(config) for _, config in plan.runs()]


def test_a_plan_that_is_no_plan_is_a_usage_error(tmp_path):
    store = new_store(tmp_path)
    (store.path / store_module.PLAN).write_text("{}")
    with pytest.raises(UsageError, match=r"is no testbed\.sweep/1"):
        store.read_plan()
