"""Runs that a virtual machine's host disturbed are run again; stolen time alone decides."""

import io
import signal
import subprocess
import sys
import types
from pathlib import Path

import msgspec
import pytest

from testbed.base.config import RunConfig
from testbed.noise.reruns import choose
from testbed.noise.steal_time import lost_of
from testbed.records.cell import Cell, StepSamples, decode_cell, encode_cell
from testbed.records.store import cell_files, create_store, timeline_of
from testbed.reporting.aggregate import collect_cells
from testbed.reporting.make import make_report
from testbed.sweeping.executor import collect, failed_cell
from testbed.sweeping.grid import Sweep
from testbed.sweeping.run import begin, carry_out, make_plan
from tests.unit.test_sweeping_store import NOW, POINTS, finish_at_once

ROOT = Path(__file__).parents[2]
SWEEP = Sweep("tiny", tuple(RunConfig(workers=w) for w in (1, 2, 3, 4)), repeats=1, max_again=2)

# Ends itself (SIGKILL) when the given point is passed for the given time.
CHILD = """
import os, signal, sys
from pathlib import Path
from tests.unit.test_sweeping_again import SHARES, SWEEP, Host
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
sys.exit(carry_out(store, Host(SHARES)))
"""
SHARES = {2: [0.3, 0.1], 3: [0.2, 0.4]}


class Host:
    """A runner on a machine whose host takes these shares, by workers, run after run.

    Runs leave what a run leaves; `dying` ones end before that.
    """

    def __init__(self, stolen, failing=(), dying=(), ran=()):
        self.stolen, self.failing, self.dying, self.ran = stolen, failing, dying, list(ran)

    def __call__(self, config, json_path, log_path):
        assert not json_path.exists()
        self.ran.append(config.workers)
        number = self.ran.count(config.workers)
        log_path.write_text(f"run {number}")
        if (config.workers, number) in self.failing:
            return failed_cell(config, "it broke")
        if (config.workers, number) not in self.dying:
            shares = self.stolen.get(config.workers, ())
            stolen = shares[number - 1] if number <= len(shares) else 0.0
            cell = finish_at_once(config, json_path, log_path)
            found = msgspec.structs.replace(cell, cores_stolen=stolen, steps=number)
            json_path.write_bytes(encode_cell(found))
            timeline_of(json_path).write_text(f"timeline {number}")
        return collect(config, json_path, log_path, "")


def new_store(path, max_again=2, within_min=None):
    sweep = Sweep("tiny", SWEEP.cells, repeats=1, max_again=max_again, again_within_min=within_min)
    return begin(make_plan(sweep), path / "store")


def run(store, host):
    out = io.StringIO()
    status = carry_out(store, host, out)
    return status, out.getvalue()


def kept(store):
    """Workers -> (which run counts, what the host took of it)."""
    cells = [decode_cell(f.read_bytes()) for f in cell_files(store.cells)]
    return {c.num_workers: (c.steps, c.cores_stolen) for c in cells}


def test_the_most_disturbed_are_run_again_and_the_quieter_run_counts(tmp_path):
    store = new_store(tmp_path)
    host = Host({1: [0.05, 0.0], 2: [0.3, 0.1], 3: [0.2, 0.4], 4: [0.02]})
    status, said = run(store, host)
    assert status == 0
    assert host.ran[4:] == [2, 3]  # the worst first, and no more than two
    assert "2 runs again" in said
    assert kept(store) == {1: (1, 0.05), 2: (2, 0.1), 3: (1, 0.2), 4: (1, 0.02)}
    assert others(store) == {2: (1, 0.3), 3: (2, 0.4)}
    words = "\n".join(make_report(collect_cells([store.path])).notes)
    assert "second of two runs; of what counts others took 10.0 %; of the other's 30.0 %" in words
    assert "first of two runs; of what counts others took 20.0 %; of the other's 40.0 %" in words
    assert "1 more runs lost 3 % or more of what counts" in words


def others(store):
    cells = [decode_cell(f.read_bytes()) for f in cell_files(store.others)]
    return {c.num_workers: (c.steps, c.cores_stolen) for c in cells}


def test_nothing_is_run_again_on_a_quiet_machine_or_unasked(tmp_path):
    quiet = new_store(tmp_path)
    assert len(run_and_count(quiet, {1: [0.02]})) == 4
    assert "no other run lost 3 %" in run(quiet, Host({}))[1]
    assert not quiet.others.exists()
    assert not any("two runs" in note for note in make_report(collect_cells([quiet.path])).notes)
    unasked = begin(make_plan(Sweep("tiny", SWEEP.cells, repeats=1)), tmp_path / "unasked")
    assert len(run_and_count(unasked, {1: [0.5]})) == 4


@pytest.mark.parametrize(("within_min", "ran"), [(10.0, [2, 3]), (5.0, [2]), (4.0, [])])
def test_only_what_will_be_done_in_time_is_run_again(tmp_path, monkeypatch, within_min, ran):
    """Each run takes ten seconds, that of two workers two minutes."""
    now_s = 0.0

    class Slow(Host):
        def __call__(self, config, json_path, log_path):
            nonlocal now_s
            now_s += 120.0 if config.workers == 2 else 10.0
            return super().__call__(config, json_path, log_path)

    clock = types.SimpleNamespace(monotonic=lambda: now_s)
    for module in ("sweeping.run", "noise.reruns"):
        monkeypatch.setattr(f"testbed.{module}.time", clock)
    host = Slow({2: [0.3], 3: [0.2]})
    said = run(new_store(tmp_path, within_min=within_min), host)[1]
    assert host.ran[4:] == ran
    assert (f"{2 - len(ran)} of them not" in said) == (len(ran) < 2)


# Shares of the steps, one of which is far worse than the others; consistency; targets reached.
@pytest.mark.parametrize(
    ("shares", "consistency", "reached", "lost"),
    [
        ([0.9, 0.0, 0.02, 0.02, 0.0], "bsp", {}, 0.01),
        ([0.0] * 5, "bsp", {}, 0.2),
        ([], "bsp", {}, 0.2),
        ([0.9, 0.0, 0.02, 0.02, 0.0], "async", {}, 0.2),
        ([0.9, 0.0, 0.02, 0.02, 0.0], "bsp", {"0.9": 3.0}, 0.2),
    ],
)
def test_what_counts_is_what_the_figures_are_of(shares, consistency, reached, lost):
    cell = Cell(
        **{"backend": "gloo", "workload": "w", "num_workers": 2, "config": RunConfig()},
        cores_stolen=0.2,
        consistency=consistency,
        time_to_accuracy_s=reached,
        samples=StepSamples(cores_stolen=shares),
    )
    assert lost_of(cell) == pytest.approx(lost)


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
    (other,) = cell_files(store.others)
    assert decode_cell(other.read_bytes()).status == "failed"


def test_a_second_run_that_leaves_nothing_is_not_taken_for_the_first(tmp_path):
    store = new_store(tmp_path)
    run(store, Host({2: [0.3]}, dying={(2, 2)}))
    assert kept(store)[2] == (1, 0.3)
    (other,) = cell_files(store.others)
    assert "wrote no result" in decode_cell(other.read_bytes()).error


def test_a_second_run_of_unknown_disturbance_does_not_count(tmp_path):
    first, second = (
        Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(), cores_stolen=share)
        for share in (0.05, None)
    )
    counting, other = choose(first, second)
    assert (counting.cores_stolen, other.cores_stolen) == (0.05, None)


def test_a_failed_run_is_no_candidate(tmp_path):
    store = new_store(tmp_path)
    host = Host({2: [0.3]}, failing={(2, 1)})
    assert run(store, host)[0] == 1
    assert len(host.ran) == 4


def test_resumed_it_repeats_no_run_twice(tmp_path):
    store = new_store(tmp_path)
    run(store, Host({2: [0.3, 0.2], 3: [0.4, 0.4], 4: [0.1]}))
    host = Host({})
    assert "2 runs were run again before: no more than 2 may be" in run(store, host)[1]
    assert host.ran == []


def test_a_cell_that_is_measured_anew_is_not_replaced_by_an_old_pair(tmp_path):
    store = new_store(tmp_path)
    run(store, Host({2: [0.3, 0.1]}))
    (file,) = (f for f in cell_files(store.cells) if decode_cell(f.read_bytes()).again)
    file.unlink()
    run(store, Host({2: [0.02]}))
    assert kept(store)[2] == (1, 0.02)
    assert decode_cell(file.read_bytes()).again == ""


@pytest.mark.parametrize("damage", ["", "no cell"])
def test_a_damaged_other_run_does_no_harm(tmp_path, damage):
    store = new_store(tmp_path)
    run(store, Host({2: [0.3, 0.02]}))
    (other,) = cell_files(store.others)
    other.write_text(damage)
    assert run_and_count(store, {}) == []  # what counts is quiet now
    assert kept(store)[2] == (2, 0.02)


# The plan and four cells are five writes; two more runs are two writes each.
@pytest.mark.parametrize("times", [5, 6, 7, 8, 9])
@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere_then_resumed(tmp_path, point, times):
    store = create_store("tiny", NOW, tmp_path / "store")
    command = [sys.executable, "-c", CHILD, str(store.path), point, str(times)]
    ended = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    first = [cell.num_workers for cell in store.read_cells().values()]
    assert carry_out(store, Host(SHARES, ran=first), io.StringIO()) == 0
    # Whenever it was killed, of each the quieter run counts and the other is kept.
    quieter = {n: min(SHARES[n]) for n in SHARES}
    assert {n: stolen for n, (_, stolen) in kept(store).items() if n in SHARES} == quieter
    assert {n: stolen for n, (_, stolen) in others(store).items()} == {
        n: max(SHARES[n]) for n in SHARES
    }
    assert not list(store.path.rglob("*.partial"))


def test_a_timeline_stays_with_its_run(tmp_path):
    store = new_store(tmp_path)
    run(store, Host(SHARES))
    counting = {2: "timeline 2", 3: "timeline 1"}  # of the first run the host took more, or less
    keys = {config.workers: key for key, config in store.read_plan().runs()}
    for workers, text in counting.items():
        other = "timeline 1" if text == "timeline 2" else "timeline 2"
        name = f"{keys[workers]}.timeline.json"
        assert (store.cells / name).read_text() == text
        assert (store.others / name).read_text() == other
    assert (store.cells / f"{keys[1]}.timeline.json").read_text() == "timeline 1"
    assert store.finished() == set(keys.values())
    assert len(collect_cells([store.path]).cells) == len(keys)
