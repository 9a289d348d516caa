"""Memory strategies with schedulers, compressors and backends: they change nothing that is trained.

Every pair of values of two axes is in some case; of the slow cases, which take all compressors,
every triple of values of three axes is. A case trains on two ranks, with the strategy and without.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import nn

from testbed.base.axes import AXES, COMPRESSORS, MEMORY, SCHEDULERS, WORKLOADS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace, TraceTensor
from testbed.compression.common import ratio_of
from testbed.launch.plan_options import parts_of
from testbed.memory.planning.lifetimes import OFFLOAD, RECOMPUTE, Action
from testbed.scheduling.protocol import make_plan
from testbed.scheduling.under_compressor import overlapped
from testbed.training.replica import strategy_of
from tests.contracts.memory_cases import build
from tests.contracts.schedules import SMALL, setup_of
from tests.contracts.specs import SCHEDULED, forgetting, job_of
from tests.harness.pairwise import Choice, covering, groups_of, possible_groups
from tests.harness.rank_pool import PoolKeeper

CASE = "tests.contracts.memory_cases:trained"
MEMORIES = (
    *(name for name in MEMORY if name not in ("none", "offload") and not name.startswith("toy")),
    "checkpoint+release",
    "checkpoint:segments=cost",
    "offload:min_kib=0",
    "offload:min_kib=0+mirror:where=host",
)
# One of each sort: dense, cast, sparse with each kind of feedback, low rank, codes, own rounds.
SORTS = (
    "none",
    "fp16",
    "ef+topk:ratio=0.05",
    "ef:units=update+topk:ratio=0.05",
    "powersgd:rank=2",
    "dgc:ratio=0.05",
    "qsgd",
    "gtopk:ratio=0.05",
    "onebit",
)
REST = tuple(
    name
    for name in COMPRESSORS
    if not COMPRESSORS.load(name).wraps and name not in {text.partition(":")[0] for text in SORTS}
)
SCHEDULES = tuple(SMALL.get(name, name) for name in SCHEDULERS)
BACKENDS = {m.text: m for m in map(forgetting, SCHEDULED) if not m.reason and m.device == "cpu"}


def config_of(choice: Choice) -> RunConfig:
    memory, scheduler, compressor, backend = choice
    return RunConfig(memory=memory, scheduler=scheduler, compressor=compressor, backend=backend)


@functools.cache
def why_refused(choice: Choice) -> str | None:
    """Why the combination is refused before ranks are started; None: it is not."""
    _, scheduler, compressor, _ = choice
    try:
        parts_of(config_of(choice), [axis for axis in AXES if axis is not WORKLOADS])
        if SCHEDULERS.resolve(scheduler).facts.sparse:
            ratio_of(COMPRESSORS.resolve(compressor).build())
    except UsageError as error:
        return str(error)
    return None


def allowed(choice: Choice) -> bool:
    return why_refused(choice) is None


def axes_of(compressors: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return (MEMORIES, SCHEDULES, compressors, tuple(BACKENDS))


@functools.cache
def pairs() -> list[Choice]:
    return covering(axes_of(SORTS), allowed)


@functools.cache
def triples() -> list[Choice]:
    return covering(axes_of((*SORTS, *REST)), allowed, size=3)


@functools.cache
def plan_of(
    scheduler: str,
    compressor: str,
    max_channels: int,
    build: Callable[[], nn.Module] = build,
) -> Plan:
    named = list(build().named_parameters())
    trace = Trace(
        name="matrix",
        device="made up",
        batch_size=1,
        tensors=tuple(
            TraceTensor(
                name=name,
                num_elements=parameter.numel(),
                dtype="float64",
                forward_s=1e-3,
                backward_s=1e-3,
            )
            for name, parameter in named
        ),
    )
    link = Link(backend="gloo", num_workers=2, latency_s=2e-4, seconds_per_byte=1e-6)
    plan = make_plan(scheduler, trace, link)
    return plan if compressor == COMPRESSORS.default else overlapped(plan, None, max_channels)[0]


def check(pools: PoolKeeper, choices: Iterable[Choice]) -> dict[str, str]:
    """All on one backend, with one scheduler and compressor: trained once without a strategy.

    Returns:
        The actions that were carried out on activations, by the strategy.
    """
    theirs, actions = None, {}
    for choice in choices:
        memory, scheduler, compressor, backend = choice
        member = BACKENDS[backend]
        plan = plan_of(scheduler, compressor, member.max_channels)
        job = job_of(member, 2)
        setup = setup_of(plan, max(job.setup.num_channels, member.max_channels))
        ranks = pools.with_setup(job, setup)
        train = functools.partial(ranks.run, CASE, plan, compressor, setup=setup)
        if theirs is None:
            theirs = train(MEMORY.default)
        # The mirror adds a gradient to what was not sent before it multiplies; else it is after.
        is_mirrored = strategy_of(memory, compressor).mirror is not None
        tolerance = 1e-12 if is_mirrored else 0.0
        for (mine, done), (plain, _) in zip(train(memory), theirs, strict=True):
            actions[memory] = done
            for a, b in zip(mine, plain, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=f"{choice}")
    return actions


def without_memory(choice: Choice) -> Choice:
    return choice[1:]


def grouped(choices: Iterable[Choice], backend: str) -> Iterator[list[Choice]]:
    """Those on one backend, by all but memory."""
    there = sorted((c for c in choices if c[3] == backend), key=without_memory)
    for _, group in itertools.groupby(there, without_memory):
        yield list(group)


def test_the_matrix_holds_every_pair_that_is_not_refused() -> None:
    held = set().union(*map(groups_of, pairs()))
    assert held == possible_groups(axes_of(SORTS), allowed)


def test_what_is_refused_is_told_before_ranks_start() -> None:
    mirrored = ("mirror", "wfbp", "ef+topk:ratio=0.05", next(iter(BACKENDS)))
    assert "ef:units=update" in str(why_refused(mirrored))
    with pytest.raises(UsageError, match="ddp"):
        parts_of(RunConfig(memory="release", backend="ddp"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_changes_nothing(pools: PoolKeeper, backend: str) -> None:
    done: dict[str, str] = {}
    for choices in grouped(pairs(), backend):
        done |= check(pools, choices)
    # All that can become of an activation has been done by then, by one strategy even.
    assert set(done["laysa"]) == {action.value for action in Action}
    assert RECOMPUTE in done["checkpoint"]
    assert OFFLOAD in done["offload:min_kib=0"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_changes_nothing_in_any_three_of_the_axes(pools: PoolKeeper, backend: str) -> None:
    """Every triple of (memory, scheduler, compressor, backend): the product has four times more."""
    for choices in grouped(triples(), backend):
        check(pools, choices)
