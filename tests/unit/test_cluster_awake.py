"""Idle cores are kept from halting while an emulated cluster is up, where that is allowed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed.cluster.system import NOT_ASKED, YES, idle_polling


def held_open(path: Path) -> bool:
    """Whether this process holds the file open; the kernel drops a request when it is closed."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(link))
        except FileNotFoundError:  # the listing's own
            continue
    return str(path) in targets


def test_no_latency_at_all_is_asked_for_as_long_as_the_block_lasts(tmp_path: Path) -> None:
    requests = tmp_path / "cpu_dma_latency"
    requests.touch()
    with idle_polling(requests=requests) as awake:
        assert awake == YES
        assert requests.read_bytes() == bytes(4)
        assert held_open(requests)
    assert not held_open(requests)


def test_nothing_is_asked_for_where_cores_may_halt(tmp_path: Path) -> None:
    requests = tmp_path / "cpu_dma_latency"
    requests.touch()
    with idle_polling(False, requests) as awake:
        assert awake == NOT_ASKED
        assert not held_open(requests)
    assert requests.read_bytes() == b""


def test_what_stands_in_the_way_is_told(tmp_path: Path) -> None:
    with idle_polling(requests=tmp_path / "missing") as awake:
        assert awake == "no: No such file or directory"
    with idle_polling(requests=tmp_path) as awake:
        assert awake == "no: Is a directory"


def test_an_error_inside_passes_through_and_ends_the_request(tmp_path: Path) -> None:
    requests = tmp_path / "cpu_dma_latency"
    requests.touch()
    with pytest.raises(OSError, match="mine"), idle_polling(requests=requests):
        raise OSError("mine")
    assert not held_open(requests)
