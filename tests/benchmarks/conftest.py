"""Benchmarks: ranks are started once for what runs on them, and are timed by their own clocks.

Under a launcher (`mpirun -n N python -m mpi4py -m pytest tests/benchmarks ...`) each pytest is a
rank: all take part in the benchmarks that have ranks, the others are left out, and rank 0 alone
writes and prints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from tests.benchmarks.cells import BACKENDS, IDENTITY, LAUNCHED
from tests.harness.benchmarking import OwnRanks, Ranks, SampledClock, StartedRanks
from tests.harness.rank_pool import PoolKeeper

WRITES = ("benchmark_json", "benchmark_save", "benchmark_autosave", "xmlpath")
COMPARES = ("benchmark_compare", "benchmark_compare_fail")
KEEPS = ("lfplugin", "nfplugin", "stepwiseplugin")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Before anything reads the options: other ranks than 0 write and compare nothing."""
    if IDENTITY.rank > 0:
        for name in (*WRITES, *COMPARES):
            setattr(config.option, name, None)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """When all plugins are there: other ranks than 0 print nothing."""
    if IDENTITY.rank == 0:
        return
    plugins = config.pluginmanager
    for name in KEEPS:
        if plugins.has_plugin(name):
            plugins.unregister(name=name)
    plugins.unregister(name="terminalreporter")
    silent = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    plugins.register(pytest.TerminalReporter(config, silent), "terminalreporter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "clock" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=SampledClock()))
    if LAUNCHED:
        without = [item for item in items if "ranks" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]


@pytest.fixture
def clock(request: pytest.FixtureRequest) -> SampledClock:
    """The benchmark's clock: moved by samples, see `SampledClock.replay`."""
    marker = request.node.get_closest_marker("benchmark")
    found = marker.kwargs["timer"]
    assert isinstance(found, SampledClock)
    return found


@pytest.fixture(scope="session")
def ranks(pools: PoolKeeper) -> Iterator[Ranks]:
    """Runs cases on all ranks of a backend."""
    if not LAUNCHED:
        yield StartedRanks(pools)
        return
    own = OwnRanks(BACKENDS)
    yield own
    own.close()


@pytest.fixture
def one_core() -> Iterator[None]:
    """Torch computes with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


if LAUNCHED:

    @pytest.fixture(autouse=True)
    def _nothing_is_left() -> None:
        """What the launcher's job opens for one benchmark stays for the next."""

    @pytest.fixture(scope="session")
    def _nothing_outlives_the_tests(_ranks_are_forked: None) -> None:
        """MPI keeps what it holds until the process ends."""


def describe(benchmark: BenchmarkFixture, group: str, **extra: object) -> None:
    """The group in which it is compared, and what its time is about; before or after measuring."""
    benchmark.group = group
    if benchmark.stats is not None:
        benchmark.stats.group = group
    benchmark.extra_info |= extra
