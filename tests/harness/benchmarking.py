"""What benchmarks share: clocks that ranks move, the job that a launcher started, a yardstick."""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

from testbed.base.axes import BACKENDS
from testbed.launch.join import assign_role, join, who_am_i
from testbed.microbench.contestants import resolve, together
from tests.harness.rank_agent import Agent, Answer, Case, Setup
from tests.harness.rank_pool import CaseFailed, Job, PoolKeeper

WITHIN_S = 100.0
FIFO = Setup("fifo", 1)
YARDSTICK_TURNS = 5_000_000


class SampledClock:
    """A clock that samples move: pytest-benchmark reads it in place of its own.

    What ranks took by their own clocks becomes the rounds of a benchmark, without the time in which
    they were told what to do and told what they measured.
    """

    __name__ = "clock moved by samples"  # as JSON calls it

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def replay(self, benchmark: BenchmarkFixture, samples_s: Sequence[float]) -> None:
        """A round of each sample."""
        left = iter(samples_s)

        def advance() -> None:
            self._now_s += next(left, 0.0)

        benchmark.pedantic(advance, rounds=len(samples_s))


def slowest(by_rank_s: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each exchange: those of the slowest rank."""
    return [max(each) for each in zip(*by_rank_s, strict=True)]


def least(by_rank_s: Sequence[Sequence[float]]) -> float:
    """The cross-rank minimum: median seconds of the rank that waited for no other."""
    return statistics.median(min(each) for each in zip(*by_rank_s, strict=True))


def yardsticks(took_s: float) -> float:
    """Processor seconds in units of what a million turns of a plain loop take here and now.

    Bounds in this unit hold on a machine of any speed. A second is 30 of them on the machine on
    which the bounds were set, which were promised in seconds of a core.
    """
    begun_s = time.process_time()
    total = 0
    for number in range(YARDSTICK_TURNS):
        total += number & 7
    return took_s / (time.process_time() - begun_s) * (YARDSTICK_TURNS / 1e6)


def processor_s(action: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Processor seconds, which other work on the machine hardly changes, and the result."""
    begun_s = time.process_time()
    result = action(*arguments)
    return time.process_time() - begun_s, result


def medians_in_turns(
    contestants: dict[str, Callable[[], Any]], rounds: int = 5
) -> dict[str, float]:
    """Median seconds of each, over rounds in which everybody has a turn, after a first one."""
    times_s: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name, run in contestants.items():
            start_s = time.perf_counter()
            run()
            times_s[name].append(time.perf_counter() - start_s)
    return {name: statistics.median(taken[1:]) for name, taken in times_s.items()}


class Ranks:
    """Whoever runs a case on all ranks of a backend: jobs that are started, or the own one."""

    def run(self, backend: str, num_ranks: int, setup: Setup, function: str, *args: Any) -> Any:
        """Call `function(backend, group, *args)` on all ranks; their results in rank order."""
        raise NotImplementedError


class StartedRanks(Ranks):
    """Jobs of the session, each started once for all cases that follow one another on it."""

    def __init__(self, pools: PoolKeeper) -> None:
        self._pools = pools

    def run(self, backend: str, num_ranks: int, setup: Setup, function: str, *args: Any) -> Any:
        pool = self._pools.with_setup(Job(backend, num_ranks, FIFO), setup)
        return pool.run(function, *args, setup=setup, within_s=WITHIN_S)


class OwnRanks(Ranks):
    """The job that a launcher started, of which this process is one rank; collective.

    Args:
        backends: that cases run on.
    """

    def __init__(self, backends: Sequence[str]) -> None:
        self._role = assign_role(who_am_i(), together(resolve(backends)), None)
        self._group = join(self._role, deadline_s=WITHIN_S)
        self._agents: dict[str, Agent] = {}

    def run(self, backend: str, num_ranks: int, setup: Setup, function: str, *args: Any) -> Any:
        agent = self._agents.get(backend)
        if agent is None:
            role = replace(self._role, backend=BACKENDS.resolve(backend))
            agent = self._agents[backend] = Agent(role, self._group)
        own = agent.perform(Case(replace(setup, prefix=f"{backend}-"), function, args))
        told = self._group.control.all_gather("answer", pickle.dumps(own), WITHIN_S)
        answers: list[Answer] = [pickle.loads(each) for each in told]
        errors = [f"rank {answer.rank}: {answer.error}" for answer in answers if answer.error]
        if errors:
            raise CaseFailed("\n".join([f"{function}{args}", *errors]))
        return [answer.result for answer in answers]

    def close(self) -> None:
        """Close all backends and leave the job."""
        for agent in self._agents.values():
            agent.close_backends()
        self._group.control.close()
