"""Memory strategies with schedulers, compressors and backends: they change nothing that is trained.

Every pair of values of two axes is in some case. A case trains twice on two ranks, with the
strategy and without.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from testbed.base.axes import AXES, COMPRESSORS, MEMORY, SCHEDULERS, WORKLOADS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace, TraceTensor
from testbed.compression.common import ratio_of
from testbed.launch.plan_options import parts_of
from testbed.scheduling.protocol import make_plan
from testbed.scheduling.under_compressor import overlapped
from tests.contracts.memory_cases import build
from tests.contracts.schedules import SMALL, setup_of
from tests.contracts.specs import SCHEDULED, job_of
from tests.harness.pairwise import Choice, covering, pairs_of, possible_pairs
from tests.harness.rank_pool import PoolKeeper

CASE = "tests.contracts.memory_cases:trained"
MEMORIES = (
    *(name for name in MEMORY if name != "none" and not name.startswith("toy")),
    "checkpoint+release",
    "checkpoint:segments=cost",
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
BACKENDS = {m.text: m for m in SCHEDULED if not m.reason and m.device == "cpu"}


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


def matrix(compressors: tuple[str, ...]) -> list[Choice]:
    return covering((MEMORIES, SCHEDULES, compressors, tuple(BACKENDS)), allowed)


def whole() -> list[Choice]:
    axes = (MEMORIES, SCHEDULES, (*SORTS, *REST), tuple(BACKENDS))
    return [choice for choice in itertools.product(*axes) if allowed(choice)]


@functools.cache
def plan_of(scheduler: str, compressor: str, max_channels: int) -> Plan:
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


def check(pools: PoolKeeper, choice: Choice) -> None:
    memory, scheduler, compressor, backend = choice
    member = BACKENDS[backend]
    plan = plan_of(scheduler, compressor, member.max_channels)
    job = job_of(member, 2)
    setup = setup_of(plan, max(job.setup.num_channels, member.max_channels))
    ranks = pools.with_setup(job, setup)
    ours, theirs = (
        ranks.run(CASE, plan, compressor, each, setup=setup) for each in (memory, MEMORY.default)
    )
    # The mirror adds a gradient to what was not sent before it multiplies, the compressor after.
    tolerance = 1e-12 if "mirror" in memory or "laysa" in memory or "auto" in memory else 0.0
    for mine, plain in zip(ours, theirs, strict=True):
        for a, b in zip(mine, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=f"{choice}")


def by_backend(choices: list[Choice]) -> dict[str, list[Choice]]:
    return {b: [choice for choice in choices if choice[3] == b] for b in BACKENDS}


def test_the_matrix_holds_every_pair_that_is_not_refused() -> None:
    axes = (MEMORIES, SCHEDULES, SORTS, tuple(BACKENDS))
    held = set().union(*(pairs_of(choice) for choice in matrix(SORTS)))
    assert held == possible_pairs(axes, allowed)
    assert len(matrix(SORTS)) < len(whole()) / 10


def test_what_is_refused_is_told_before_ranks_start() -> None:
    mirrored = ("mirror", "wfbp", "ef+topk:ratio=0.05", next(iter(BACKENDS)))
    assert "ef:units=update" in str(why_refused(mirrored))
    with pytest.raises(UsageError, match="ddp"):
        parts_of(RunConfig(memory="release", backend="ddp"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_changes_nothing(pools: PoolKeeper, backend: str) -> None:
    for choice in by_backend(matrix(SORTS))[backend]:
        check(pools, choice)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_changes_nothing_in_any_combination(pools: PoolKeeper, backend: str) -> None:
    for choice in by_backend(whole())[backend]:
        check(pools, choice)
