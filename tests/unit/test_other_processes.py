"""What processes outside the cell take is told from what its own take."""

import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.forking import OWNER
from testbed.forking.process import root_of
from testbed.noise import other_processes
from testbed.noise.other_processes import CoreUse, OtherProcesses, outside_share
from testbed.records.cell import StepSamples

BUSY = "import time\nprint(flush=True)\nwhile time.process_time() < 1.5: pass\nprint(flush=True)\n"


@given(st.floats(0, 1e4), st.floats(0, 1), st.floats(1, 2))
def test_a_share_is_a_share_and_own_time_is_not_outside(busy_s, own, idle):
    share = outside_share(busy_s, own * busy_s, idle * busy_s)
    assert 0 <= share <= 1
    assert outside_share(busy_s, busy_s, idle * busy_s) == 0


def test_a_window_in_which_nothing_was_counted_has_no_share():
    assert outside_share(0.0, 0.0, 0.0) == 0


def test_what_a_process_of_the_cell_uses_is_its_own():
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as busy:
        busy.stdout.readline()
        others = OtherProcesses(os.getpid())
        before = others.read()
        busy.stdout.readline()
        after = others.read()
    assert after.since(before).own_s > 0.8


def test_what_another_process_uses_is_outside():
    others = OtherProcesses(os.getpid())  # of the family that there is now
    others.begin()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as busy:
        busy.stdout.readline()
        busy.stdout.readline()
        assert 0 < others.whole_share() <= 1


def test_short_steps_are_not_resolved_and_the_next_long_one_not_from_them(monkeypatch):
    now, readings = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(OtherProcesses, "read", lambda self: readings[-1])
    monkeypatch.setattr(other_processes.os, "sched_getaffinity", lambda pid: {0, 1})
    readings.append(CoreUse(0.0, 0.0, 0.0, 0.0))
    others = OtherProcesses(os.getpid())

    def after(seconds, *reading):
        now[0] += seconds
        readings.append(CoreUse(*reading, stolen_s=0.0))
        return others.share()

    assert after(5.0, 10.0, 5.0, 10.0) == pytest.approx(outside_share(10.0, 5.0, 10.0))
    assert after(0.1, 90.0, 0.0, 90.0) == 0
    assert after(5.0, 99.0, 5.0, 100.0) == 0  # it would hold the short step, too
    assert after(5.0, 109.0, 10.0, 110.0) == pytest.approx(outside_share(10.0, 5.0, 10.0))


def test_what_is_taken_is_the_host_s_and_the_others():
    assert StepSamples(cores_stolen=[0.1, 0.0]).cores_taken == [0.1, 0.0]
    both = StepSamples(cores_stolen=[0.1, 0.0], cores_outside=[0.2, 0.3])
    assert both.cores_taken == pytest.approx([0.3, 0.3])


def test_the_root_is_the_owner_of_the_fork_server_or_what_started_the_rank():
    assert root_of({OWNER: str(os.getppid())}, alone=False) == os.getppid()
    assert root_of({OWNER: str(os.getpid())}, alone=False) == os.getpid()
    stranger = {OWNER: "999999999"}
    assert root_of(stranger, alone=False) == os.getppid()
    assert root_of({}, alone=True) == os.getpid()
