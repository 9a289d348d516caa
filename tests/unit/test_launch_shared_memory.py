"""The folder of MPI's shared memory: there while a job runs, gone afterwards, also a dead one's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed.launch.mpirun import PREFIX, SUFFIX, shared_memory


def test_it_is_gone_with_all_that_a_killed_rank_left_in_it(tmp_path: Path) -> None:
    with shared_memory(tmp_path) as folder:
        assert folder is not None
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "sm_segment.host.0.1.0").write_bytes(b"x")
    assert os.listdir(tmp_path) == []


def test_it_is_gone_when_the_job_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), shared_memory(tmp_path):
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_what_nobody_holds_is_removed_and_what_a_job_holds_stays(tmp_path: Path) -> None:
    left = tmp_path / f"{PREFIX}left{SUFFIX}"
    left.mkdir()
    (left / "sm_segment.host.0.1.0").write_bytes(b"x")
    (tmp_path / "sm_segment.host.0.2.0").mkdir()
    with shared_memory(tmp_path) as first, shared_memory(tmp_path) as second:
        assert first is not None
        assert second is not None
        assert first.is_dir()
        assert second.is_dir()
        assert not left.exists()
    assert os.listdir(tmp_path) == ["sm_segment.host.0.2.0"]


def test_without_such_memory_there_is_no_folder(tmp_path: Path) -> None:
    with shared_memory(tmp_path / "nowhere") as folder:
        assert folder is None
