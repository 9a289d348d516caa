"""Ranks of one host wait for each other before MPI does, with a deadline, and for nobody else."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from testbed.base.errors import DeadlineExceeded, RankLost
from testbed.launch.identity import Identity
from testbed.launch.rendezvous import roll_call

WAIT_S = 20.0
NOBODY = 65534


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The variable that names a job of Open MPI."""
    return {"PMIX_NAMESPACE": str(tmp_path)}


@pytest.fixture
def strangers() -> Iterator[ExitStack]:
    with ExitStack() as connections:
        yield connections


def be(rank: int, job: dict[str, str], start_s: float, size: int = 2) -> None:
    variables = {"OMPI_COMM_WORLD_LOCAL_SIZE": str(size)}
    roll_call(Identity("openmpi", rank, size, rank, size, variables), job, start_s)


def connect(job: dict[str, str]) -> socket.socket:
    """To rank 0, once it listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        try:
            connection.connect(f"\0testbed/{os.getuid()}/{job['PMIX_NAMESPACE']}")
        except ConnectionRefusedError:
            continue
        return connection


class Rank(threading.Thread):
    """A rank in a thread, with the error that it ended with."""

    def __init__(self, rank: int, job: dict[str, str], start_s: float, size: int = 2) -> None:
        super().__init__(daemon=True)
        self.arguments, self.error = (rank, job, start_s, size), None
        self.start()

    error: Exception | None

    def run(self) -> None:
        try:
            be(*self.arguments)
        except Exception as error:
            self.error = error

    def end(self) -> Exception | None:
        self.join(WAIT_S)
        assert not self.is_alive()
        return self.error


def test_all_ranks_go_on_together(job: dict[str, str]) -> None:
    assert [rank.end() for rank in [Rank(r, job, WAIT_S, 3) for r in range(3)]] == [None] * 3


def test_a_connection_that_says_nothing_delays_nobody(
    job: dict[str, str], strangers: ExitStack
) -> None:
    first = Rank(0, job, WAIT_S)
    strangers.enter_context(connect(job))
    second = Rank(1, job, WAIT_S)
    assert (first.end(), second.end()) == (None, None)


def test_a_connection_that_says_nothing_is_no_rank(
    job: dict[str, str], strangers: ExitStack
) -> None:
    first = Rank(0, job, 0.5)
    strangers.enter_context(connect(job))
    error = first.end()
    assert isinstance(error, DeadlineExceeded)
    assert str(error).startswith(f"rank 1 (host {socket.gethostname()}) did not start within")


@pytest.mark.parametrize("said", [0, 2, 1 << 31])
def test_a_number_that_is_none_of_the_ranks_is_dropped(
    said: int, job: dict[str, str], strangers: ExitStack
) -> None:
    first = Rank(0, job, WAIT_S)
    stranger = strangers.enter_context(connect(job))
    stranger.settimeout(WAIT_S)
    stranger.send(said.to_bytes(4, "big"))
    assert stranger.recv(4) == b""
    assert Rank(1, job, WAIT_S).end() is None
    assert first.end() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_no_rank(job: dict[str, str], strangers: ExitStack) -> None:
    first = Rank(0, job, WAIT_S)
    strangers.enter_context(connect(job))  # it listens
    os.seteuid(NOBODY)
    try:
        stranger = strangers.enter_context(connect(job))
    finally:
        os.seteuid(0)
    stranger.settimeout(WAIT_S)
    assert stranger.recv(4) == b""
    assert Rank(1, job, WAIT_S).end() is None
    assert first.end() is None


def test_a_rank_that_ended_after_it_had_come_is_named(job: dict[str, str]) -> None:
    first = Rank(0, job, WAIT_S, 3)
    with connect(job) as second:
        second.send((1).to_bytes(4, "big"))
    third = Rank(2, job, WAIT_S, 3)
    error = first.end()
    assert isinstance(error, RankLost)
    assert error.lost == "rank 1"
    third.end()
