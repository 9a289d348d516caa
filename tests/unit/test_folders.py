"""Folders of one process: there while it runs, removed by the next one if it was killed."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.base.errors import UsageError
from testbed.base.folders import held_folder
from testbed.launch.mpirun import shared_memory
from testbed.records.store import Store

HOLD = """
import sys
from pathlib import Path
from testbed.base.folders import held_folder
with held_folder(Path(sys.argv[1]), "a-", ".held") as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one_and_not_before(tmp_path):
    other = tmp_path / "a-stays"
    other.mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        left = Path(one.stdout.readline().strip())
        with held_folder(tmp_path, "a-", ".held") as second:
            assert (left / "file").is_file()
        assert not second.exists()
        one.send_signal(signal.SIGKILL)
    assert left.is_dir()
    with held_folder(tmp_path, "b-", ".held"):
        assert left.is_dir()
    with held_folder(tmp_path, "a-", ".held") as third:
        assert not left.exists()
        assert third.is_dir()
    assert os.listdir(tmp_path) == ["a-stays"]


def test_a_folder_that_somebody_took_for_abandoned_is_given_up_for_another(tmp_path, monkeypatch):
    made = []

    def taken_once(descriptor, kind):
        made.append(descriptor)
        if len(made) == 1:
            raise BlockingIOError(errno.EWOULDBLOCK, "somebody who cleans up holds it")

    monkeypatch.setattr("testbed.base.folders.fcntl.flock", taken_once)
    with held_folder(tmp_path, "a-", ".held") as folder:
        assert len(made) == 2
        assert folder.is_dir()
        assert len(os.listdir(tmp_path)) == 2  # the other one is left to who holds it


def test_where_nothing_can_be_locked_it_fails_instead_of_trying_for_ever(tmp_path, monkeypatch):
    def no_locks(descriptor, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("testbed.base.folders.fcntl.flock", no_locks)
    with (
        pytest.raises(OSError, match=r"cannot be locked.*No locks"),
        held_folder(tmp_path, "a-", ".held"),
    ):
        pass
    assert os.listdir(tmp_path) == []
    with shared_memory(tmp_path) as folder:
        assert folder is None
    told = r"cannot be locked .*No locks available"
    with pytest.raises(UsageError, match=told), Store(tmp_path).locked():
        pass
