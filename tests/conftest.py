"""What all tests share: whoever leaves something behind fails."""

from __future__ import annotations

import getpass
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import zmq

from testbed.forking import SERVER, fork_server
from tests.harness.leaks import Owned, held, wait_for_no_leaks
from tests.harness.rank_pool import PoolKeeper


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ends_job(turn): runs last on its job's ranks, in turn")
    # A shell's background job ignores Ctrl-C, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # How long an example takes says more of what runs beside the tests than of the example.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forked() -> Iterator[None]:
    """Ranks, servers and commands are forked from a few processes, which the session shares."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command has it
    # As torch sets it some time later, after which a second server of each kind would be needed.
    cache = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    with fork_server({**os.environ, "OMP_NUM_THREADS": "1"}) as environment:
        os.environ[SERVER] = environment[SERVER]
        yield
        del os.environ[SERVER]


@pytest.fixture(scope="session")
def _nothing_outlives_the_tests(_ranks_are_forked: None) -> Iterator[None]:
    """What one look overlooked is seen when all has ended."""
    before = held(Owned())
    yield
    leaks = wait_for_no_leaks(lambda: (), before, within_s=5.0)
    assert not leaks, f"outlived all tests: {leaks}"


@pytest.fixture(scope="session")
def pools(_nothing_outlives_the_tests: None) -> Iterator[PoolKeeper]:
    """The jobs that live between tests."""
    keeper = PoolKeeper()
    yield keeper
    keeper.close()


@pytest.fixture(scope="session", autouse=True)
def _libraries_are_warm() -> None:
    """What a library starts once and keeps for the life of the process is no test's leak.

    The first message that pyzmq sends without a copy starts the thread that frees such messages.
    Torch computes with one thread, as it does on the ranks: more of them spin while they wait for
    each other, which costs more than they gain on tensors of tests.
    """
    torch.set_num_threads(1)
    with zmq.Context() as context, context.socket(zmq.PAIR) as left:
        left.bind("inproc://warm")
        with context.socket(zmq.PAIR) as right:
            right.connect("inproc://warm")
            left.send(bytes(1 << 20), copy=False)
            right.recv()
    if torch.cuda.is_available():
        weight = torch.ones(64, 64, device="cuda", requires_grad=True)
        torch.nn.functional.conv2d(
            (weight @ weight).view(1, 1, 64, 64), weight[None, None]
        ).backward()
        weight.cpu().pin_memory()
        torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def _nothing_is_left(pools: PoolKeeper) -> Iterator[None]:
    """Threads, child processes and descriptors after a test are those before it."""
    before = held(Owned.by(pools.live()))
    yield
    leaks = wait_for_no_leaks(pools.live, before, within_s=5.0)
    assert not leaks, f"the test left behind: {leaks}"
