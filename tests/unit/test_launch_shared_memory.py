"""The folder of MPI's shared memory: there while a job runs, gone afterwards, also a dead one's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed.cluster.owner import own_prefix
from testbed.launch.shared_memory import shared_memory


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


def test_those_of_killed_owners_are_removed_and_nobody_else_s(tmp_path: Path) -> None:
    never = "testbed-1-999999999999-0-shared"  # process 1 did not start then
    alive = f"{own_prefix(7)}-shared"
    for name in (never, alive, "sm_segment.host.0.2.0"):
        (tmp_path / name).mkdir()
    with shared_memory(tmp_path):
        assert not (tmp_path / never).exists()
    assert sorted(os.listdir(tmp_path)) == sorted([alive, "sm_segment.host.0.2.0"])


def test_without_such_memory_there_is_no_folder(tmp_path: Path) -> None:
    with shared_memory(tmp_path / "nowhere") as folder:
        assert folder is None
