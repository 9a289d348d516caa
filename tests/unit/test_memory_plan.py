"""LaySA's choice against exhaustive search on the same simulator, and its bounds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import msgspec
import pytest

from testbed.base.errors import UsageError
from testbed.memory.planning.bounds import Bounds, relaxed
from testbed.memory.planning.laysa import DoesNotFit, laysa
from testbed.memory.planning.lifetimes import Costs, Footprint, Lifetimes
from testbed.memory.planning.plan import MemoryPlan, decode_memory_plan
from testbed.memory.planning.search import Search
from testbed.memory.planning.simulator import Simulator, simulate
from testbed.memory.planning.units import blocks, is_cheap, spread
from tests.harness.memory_steps import (
    random_chain,
    random_dag,
    residual_network,
    transformer,
)

HOSTS = (Costs(host_bytes_per_s=3.0), Costs(host_bytes_per_s=40.0, copy_share=0.5, in_flight=1))


def all_footprints(step: Lifetimes, costs: Costs, actions: str = "kros") -> dict[str, Footprint]:
    """Of every choice of one action for each layer."""
    simulator = Simulator(step, costs)
    return {
        "".join(letters): simulator.footprint(spread(step, "".join(letters)))
        for letters in itertools.product(actions, repeat=len(step.units))
    }


def between(seed: int, found: dict[str, Footprint]) -> int:
    """A budget that some choices fit, and not all."""
    peaks = sorted({footprint.peak_bytes for footprint in found.values()})
    return peaks[random.Random(seed).randrange(len(peaks))]


def assert_best(step: Lifetimes, costs: Costs, seed: int) -> None:
    step = msgspec.structs.replace(step, least_moved_bytes=10 * (seed % 3 % 2))
    found = all_footprints(step, costs)
    budget = between(seed, found)
    plan = laysa(step, costs, budget)
    assert plan.gap == 0.0
    assert plan.peak_bytes <= budget
    best = min(f.extra_s for f in found.values() if f.peak_bytes <= budget)
    assert plan.extra_s == pytest.approx(best, rel=1e-9)
    least = laysa(step, costs)
    in_step = {letters: f for letters, f in found.items() if "o" not in letters}
    peak, extra_s = min((f.peak_bytes, f.extra_s) for f in in_step.values())
    assert least.peak_bytes == peak == min(f.peak_bytes for f in found.values())
    assert least.extra_s <= extra_s * (1 + 1e-9)
    assert least.gap == 0.0


@pytest.mark.parametrize("part", range(4))
def test_best_of_all_choices_on_chains(part: int) -> None:
    for seed in range(50 * part, 50 * part + 50):
        assert_best(random_chain(seed, 1 + seed % 6), HOSTS[seed % 2], seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_best_of_all_choices_on_longer_chains(seed: int) -> None:
    assert_best(random_chain(1000 + seed, 8), HOSTS[seed % 2], seed)


@pytest.mark.parametrize("part", range(2))
def test_best_of_all_choices_on_graphs(part: int) -> None:
    for seed in range(20 * part, 20 * part + 20):
        assert_best(random_dag(seed, 2 + seed % 4), HOSTS[seed % 2], seed)


def test_best_of_all_choices_on_a_residual_block() -> None:
    step = blocks(residual_network(1, 1 << 10), at_most=7)
    assert len(step.units) <= 7
    assert_best(step, Costs(host_bytes_per_s=1e6), 1)


@pytest.mark.parametrize("make", [random_chain, random_dag])
def test_no_choice_lies_below_the_bounds(make: Callable[[int, int], Lifetimes]) -> None:
    for seed in range(30):
        step, costs = make(seed, 1 + seed % 5), HOSTS[seed % 2]
        step = msgspec.structs.replace(step, least_moved_bytes=10 * (seed % 3 % 2))
        simulator = Simulator(step, costs)
        bounds = Bounds(simulator)
        found = all_footprints(step, costs, "kros"[: 4 if seed % 5 < 3 else 3])
        for letters, footprint in found.items():
            actions = simulator.settled(spread(step, letters))
            assert int(bounds.level(actions).max()) <= footprint.peak_bytes
            assert bounds.extra_s(actions) <= footprint.extra_s
        budget = between(seed, found)
        least = relaxed(bounds, budget)
        assert least is not None
        assert least.extra_s <= min(f.extra_s for f in found.values() if f.peak_bytes <= budget)
        least_peak = relaxed(bounds, None)
        assert least_peak is not None
        assert least_peak.peak_bytes <= min(f.peak_bytes for f in found.values())


def test_without_branch_and_bound_it_is_near_and_says_how_near(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("testbed.memory.planning.search.MAX_EXACT_UNITS", 0)
    for seed in range(30):
        step, costs = (random_chain, random_dag)[seed % 2](seed, 5), HOSTS[seed // 2 % 2]
        found = all_footprints(step, costs)
        budget = between(seed, found)
        plan = laysa(step, costs, budget)
        best = min(f.extra_s for f in found.values() if f.peak_bytes <= budget)
        assert plan.extra_s <= best * 1.01 + 1e-9
        assert plan.extra_s * (1 - plan.gap) <= best * (1 + 1e-9)


def test_what_cannot_fit_is_refused_with_the_budget_that_would_do() -> None:
    for seed in range(10):
        step = random_chain(seed, 4)
        least = min(f.peak_bytes for f in all_footprints(step, HOSTS[0], "krs").values())
        with pytest.raises(DoesNotFit, match="the least that a step takes") as caught:
            laysa(step, HOSTS[0], least - 1)
        assert caught.value.smallest_bytes == least
        assert laysa(step, HOSTS[0], least).peak_bytes == least
        assert caught.value.plan.peak_bytes == least


def test_the_cost_may_be_that_of_the_whole_iteration() -> None:
    """Gradients leave at 1/4 byte a second, in order: what is late at the end costs nothing."""

    def iteration_s(footprint: Footprint) -> float:
        free = 0.0
        for gradient, ready_s in zip(step.gradients, footprint.ready_s, strict=True):
            free = max(free, ready_s) + 4 * gradient.num_bytes
        return max(free, step.time_s[-1] + footprint.extra_s)

    told = 0
    for seed in range(40):
        step = random_chain(seed, 5)
        found = all_footprints(step, HOSTS[0])
        budget = between(seed, found)
        fitting = [f for f in found.values() if f.peak_bytes <= budget]
        plan = laysa(step, HOSTS[0], budget, iteration_s)
        footprint = simulate(step, plan.actions, HOSTS[0])
        assert iteration_s(footprint) == pytest.approx(min(map(iteration_s, fitting)))
        shortest = simulate(step, laysa(step, HOSTS[0], budget).actions, HOSTS[0])
        told += iteration_s(shortest) > iteration_s(footprint) + 1e-9
    assert told > 0


@pytest.mark.parametrize("step", [residual_network(16), transformer(6)])
@pytest.mark.parametrize("share", [0.8, 0.65])
def test_large_models_fit_and_the_same_choice_is_made_again(
    step: Lifetimes, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testbed.memory.planning.search.MAX_TRIES", 300)
    costs = Costs(host_bytes_per_s=1e9)
    most = simulate(step, "k" * len(step.values), costs).peak_bytes
    plan = laysa(step, costs, int(share * most), at_most=60)
    assert plan.peak_bytes <= share * most
    assert 0.0 <= plan.gap < 1.0
    assert len(plan.units) <= 60
    assert simulate(step, plan.actions, costs).peak_bytes == plan.peak_bytes
    assert laysa(step, costs, int(share * most), at_most=60) == plan
    assert all(choice.why for choice in plan.units)


def test_making_all_again_is_not_the_least_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that is made again as a whole is there as a whole; segments are not."""
    monkeypatch.setattr("testbed.memory.planning.search.MAX_TRIES", 300)
    step = residual_network(8)
    slow = Costs(host_bytes_per_s=1e3, copy_share=1.0)
    all_again = simulate(step, "r" * len(step.values), slow).peak_bytes
    plan = laysa(step, slow, int(0.7 * all_again), at_most=40)
    assert plan.peak_bytes <= 0.7 * all_again
    assert "k" in plan.actions
    assert "r" in plan.actions


def test_a_plan_is_saved_and_read_and_has_a_digest() -> None:
    step = random_chain(3, 4)
    plan = laysa(step, HOSTS[0])
    again = decode_memory_plan(msgspec.json.encode(plan), "plan.json")
    assert again == plan
    assert again.digest() == plan.digest()
    assert MemoryPlan(strategy="none").digest() != plan.digest()
    with pytest.raises(UsageError, match="no memory plan"):
        decode_memory_plan(b"{}", "plan.json")


def test_merged_layers_hold_the_same_operators() -> None:
    step = residual_network(50)
    merged = blocks(step, at_most=120)
    assert len(merged.units) <= 120 < len(step.units)
    assert [op.name for op in merged.ops] == [op.name for op in step.ops]
    assert merged.values == step.values
    for op, before in zip(merged.ops, step.ops, strict=True):
        name, leaf = merged.units[op.unit], step.units[before.unit]
        assert leaf.startswith(name.partition(".*")[0])
        if "(cheap)" in name:
            assert is_cheap(op.name)
    for at_most in (40, 7, 2, 1):
        assert at_most / 2 <= len(blocks(step, at_most).units) <= at_most
    assert blocks(step, at_most=1000) is step


def test_every_choice_of_the_search_is_scored_by_the_simulator() -> None:
    step = random_dag(5, 4)
    search = Search(step, HOSTS[0], 60, lambda footprint: footprint.extra_s)
    found = search.run()
    footprint = simulate(step, spread(step, found.letters), HOSTS[0])
    assert found.score == (
        max(0, footprint.peak_bytes - 60),
        footprint.extra_s,
        footprint.peak_bytes,
    )
