"""Folders of one process: there while it runs, removed by the next one if it was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from testbed.base.folders import held_folder

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
