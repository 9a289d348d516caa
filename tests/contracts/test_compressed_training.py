"""Every compressor with every scheduler and backend trains as its reference in one thread."""

from __future__ import annotations

import functools

import pytest
import torch

from testbed.training.sampling import digest_tensors
from tests.contracts.compressed_cases import Compressed, in_one_thread
from tests.contracts.schedules import SPECS as SCHEDULES
from tests.contracts.schedules import Training, plan_of, setup_of
from tests.contracts.session_models import Recipe
from tests.contracts.specs import DEFAULTS, Member, forgetting, jobs
from tests.harness.compressors import SPECS, keeping, resolve_compressor
from tests.harness.rank_pool import Job, PoolKeeper

CASE = "tests.contracts.compressed_cases:trained"
COMPLETE = Training(Recipe("complete", accumulate=2, steps=3), "bandwidth-bound")
AWKWARD = Training(Recipe("awkward", steps=4), "bandwidth-bound")
# One of each sort: gathered once, two sums, rounds of deliveries; draws, and kept residuals.
SORTS = ("ef+topk:ratio=0.05", "powersgd:rank=2", "gtopk:ratio=0.05", "oktopk:ratio=0.05,every=2")
# Additions in rank order, or of codes that all ranks decode alike: equal to the last bit anywhere.
GATHERED = ("ef+topk:ratio=0.05", "ef-sign", "qsgd", "dgc:ratio=0.05,momentum=0.5", "onebit")

# `none` has no conversations: here the same sums take the compressors' path.
CONVERSING = (*(s for s in SPECS if s != "none"), "by-size:min_elements=1000000+topk")
BUCKETS = "bucket:mib=0.02,first_mib=0.005"

FOLLOWING = tuple(forgetting(m) for m in DEFAULTS if m.follows_plans)
ELSEWHERE = tuple(m for m in FOLLOWING if m.text != "loopback")
SHORT_AND_LONG = (
    pytest.param((*SORTS, "ef+randomk"), id="one of each sort"),
    pytest.param(CONVERSING, id="all", marks=pytest.mark.slow),
)
LOOPBACK = tuple(m for m in FOLLOWING if m.text == "loopback")


def few(members: tuple[Member, ...]) -> list[object]:
    return jobs(members, lambda n: n in (2, 3), quick=(2,))


def train(
    pools: PoolKeeper,
    job: Job,
    training: Training,
    spec: str,
    text: str,
    held_up: bool = False,
    plans_anew: bool = False,
    compared_steps: int = 0,
    max_channels: int = 1,
) -> list[Compressed]:
    plan = plan_of(spec, training, job.num_ranks)
    setup = setup_of(plan, max(job.setup.num_channels, max_channels))
    ranks = pools.with_setup(job, setup)
    how = (text, held_up, plans_anew, compared_steps, max_channels)
    trained: list[Compressed] = ranks.run(CASE, training.recipe, plan, *how, setup=setup)
    what = f"{text} with {spec}"
    assert len({digest_tensors(rank.parameters) for rank in trained}) == 1, what
    return trained


@functools.cache
def alone(training: Training, spec: str, text: str, num_ranks: int) -> list[torch.Tensor]:
    return in_one_thread(training.recipe, plan_of(spec, training, num_ranks), text, num_ranks)


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("job", jobs(LOOPBACK, lambda n: n in (1, 2, 3), quick=(2,)))
def test_every_compressor_is_its_reference_bit_for_bit(job: Job, pools: PoolKeeper) -> None:
    for text in CONVERSING:
        trained = train(pools, job, COMPLETE, "wfbp", text, held_up=True)
        assert same(trained[0].parameters, alone(COMPLETE, "wfbp", text, job.num_ranks)), text


@pytest.mark.parametrize("job", few(FOLLOWING))
@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(GATHERED[:2], id="two"),
        pytest.param(GATHERED, id="all", marks=pytest.mark.slow),
    ],
)
def test_gathered_means_are_equal_to_the_last_bit(
    job: Job, texts: tuple[str, ...], pools: PoolKeeper
) -> None:
    for text in texts:
        trained = train(pools, job, COMPLETE, BUCKETS, text)
        wanted = alone(COMPLETE, BUCKETS, text, job.num_ranks)
        assert same(trained[0].parameters, wanted), text


@pytest.mark.parametrize("job", few(ELSEWHERE))
@pytest.mark.parametrize("texts", SHORT_AND_LONG)
def test_all_ranks_end_alike(job: Job, texts: tuple[str, ...], pools: PoolKeeper) -> None:
    for text in texts:
        train(pools, job, AWKWARD, "wfbp", keeping(text))


@pytest.mark.parametrize("job", jobs(FOLLOWING, lambda n: n in (2, 3), quick=()))
@pytest.mark.parametrize("spec", SCHEDULES)
def test_every_scheduler_carries_every_sort(job: Job, spec: str, pools: PoolKeeper) -> None:
    carries(pools, job, spec, SORTS)


@pytest.mark.parametrize("job", few(LOOPBACK))
@pytest.mark.parametrize("spec", SCHEDULES)
def test_every_scheduler_carries_two_rounds(job: Job, spec: str, pools: PoolKeeper) -> None:
    carries(pools, job, spec, ("warmup:stage_steps=2+gtopk:ratio=0.05",))


def carries(pools: PoolKeeper, job: Job, spec: str, texts: tuple[str, ...]) -> None:
    """All ranks submit the same in the same order, and end as one thread does or at least alike."""
    exact = job.backend == "loopback"
    ratios = any(m.ratio is not None for m in plan_of(spec, COMPLETE, job.num_ranks).messages)
    for text in texts:
        if ratios and "ratio" not in text:
            continue  # refused, see tests/unit/test_session_compressed.py
        trained = train(pools, job, COMPLETE, spec, text, held_up=True)
        if exact:
            wanted = alone(COMPLETE, spec, text, job.num_ranks)
            assert same(trained[0].parameters, wanted), f"{text} with {spec}"
        assert trained[0].requests, text
        for rank in trained[1:]:
            assert rank.requests == trained[0].requests, f"{text} with {spec}"
        train(pools, job, AWKWARD, spec, text, held_up=True, plans_anew=True)


@pytest.mark.parametrize("job", few(FOLLOWING))
def test_by_turns_on_several_channels_nothing_changes(job: Job, pools: PoolKeeper) -> None:
    """Ranks that are held up begin messages of different channels in different orders."""
    for text in GATHERED[:2]:
        by_turns = train(pools, job, COMPLETE, "wfbp", text, held_up=True, max_channels=3)
        assert set(by_turns[0].requests) == {0, 1, 2}
        wanted = alone(COMPLETE, "wfbp", text, job.num_ranks)
        assert same(by_turns[0].parameters, wanted), text
    for text in SORTS:
        train(pools, job, AWKWARD, "wfbp", text, held_up=True, plans_anew=True, max_channels=3)


@pytest.mark.parametrize("job", few(FOLLOWING))
@pytest.mark.parametrize("spec", ["wfbp", "dear:mib=0.02", "asc-wfbp:channels=3"])
def test_nothing_left_out_is_dense(job: Job, spec: str, pools: PoolKeeper) -> None:
    (dense, *_) = train(pools, job, COMPLETE, spec, "none")
    for text in ("topk:ratio=1.0", "ef+randomk:ratio=1.0", "by-size:min_elements=1000000+topk"):
        (whole, *_) = train(pools, job, COMPLETE, spec, text)
        for ours, theirs in zip(whole.parameters, dense.parameters, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("job", few(FOLLOWING))
def test_what_is_recorded_is_what_the_compressor_says(job: Job, pools: PoolKeeper) -> None:
    recipe, text = COMPLETE.recipe, "ef+topk:ratio=0.05"
    trained = train(pools, job, COMPLETE, "wfbp", text, compared_steps=2)
    plan = plan_of("wfbp", COMPLETE, job.num_ranks)
    compressor = resolve_compressor(text)
    for rank in trained:
        costs = rank.costs
        told = [compressor.payload_bytes(n, 4, None) for n in plan.num_elements]
        assert costs.dense_bytes == 4 * sum(plan.num_elements) * recipe.steps
        assert costs.sent_bytes == sum(t.most for t in told) * recipe.steps
        assert costs.num_sent / costs.num_elements == pytest.approx(0.05, rel=0.02)
        assert rank.state_bytes == 4 * sum(plan.num_elements)
        assert min(costs.encode_s, costs.decode_s, costs.communication_s) > 0
        assert len(rank.relative_errors) == 2
        assert all(0.01 < error < 1 for error in rank.relative_errors)
        assert rank.relative_errors == trained[0].relative_errors
