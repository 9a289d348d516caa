"""Checkpointing, offload, the choice among strategies, and planning memory with the schedule."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from testbed.base.errors import UsageError
from testbed.memory.checkpoint import CheckpointOptions, by_cost, in_segments
from testbed.memory.checkpoint import checkpoint as checkpoint_part
from testbed.memory.layer_centric import LaysaOptions, cheapest
from testbed.memory.offload import OffloadOptions, of_size
from testbed.memory.offload import offload as offload_part
from testbed.memory.planning.joint import plan_jointly, ready_s_by_name
from testbed.memory.planning.laysa import DoesNotFit, laysa
from testbed.memory.planning.lifetimes import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    Costs,
    Footprint,
    Lifetimes,
    settled,
)
from testbed.memory.planning.plan import MemoryPlan
from testbed.memory.planning.simulator import simulate
from testbed.memory.planning.units import is_cheap, spread
from testbed.memory.strategy import Limits, Strategy
from tests.harness.memory_steps import (
    Tape,
    random_chain,
    random_dag,
    residual_network,
    transformer,
)

SLOW_HOST = Costs(host_bytes_per_s=3.0, in_flight=1)


def chosen(strategy: Strategy, step: Lifetimes, limits: Limits | None = None) -> MemoryPlan:
    """The plan of a strategy for a recorded step."""
    assert strategy.choose is not None
    return strategy.choose(step, limits or Limits(budget_bytes=None, costs=Costs()))


def checkpoint(step: Lifetimes, segments: str = "sqrt") -> MemoryPlan:
    return chosen(checkpoint_part(CheckpointOptions(segments=segments)), step)


def equal_layers(count: int) -> Lifetimes:
    """Layers of 1 byte and 1 second that save what they make; gradients of activations apart."""
    tape = Tape()
    value = tape.op("0", "aten.mm.default", (), (1,), (-1,))
    for number in range(1, count):
        value = tape.op(str(number), "aten.mm.default", (value,), (1,), (-1,))
    return tape.step()


@pytest.mark.parametrize(("count", "segments", "peak"), [(9, 3, 6), (100, 10, 20), (16, 4, 8)])
def test_equal_layers_in_the_published_number_of_segments(
    count: int, segments: int, peak: int
) -> None:
    """About count / s values stay, those of one segment come to them; at most one more forward."""
    step = equal_layers(count)
    plan = checkpoint(step)
    assert plan.actions == in_segments(step, segments)
    # of each segment but the last one its last value stays, and of the last all
    assert plan.actions.count(KEEP) == segments - 1 + count // segments
    assert abs(simulate(step, plan.actions).activation_bytes - peak) <= 2
    assert plan.extra_s == count - plan.actions.count(KEEP)


def test_what_crosses_a_border_is_kept_and_the_rest_made_again() -> None:
    step = residual_network(8, 1 << 10)
    for segments in (1, 2, 5):
        plan = checkpoint(step, str(segments))
        again = [n for n, action in enumerate(plan.actions) if action == RECOMPUTE]
        assert bool(again) == (segments > 1)
        assert OFFLOAD not in plan.actions
        made = simulate(step, plan.actions)
        assert made.recomputed_s <= sum(op.time_s for op in step.ops) * 1.01
        if segments > 1:
            assert made.peak_bytes < simulate(step, KEEP * len(step.values)).peak_bytes


@pytest.mark.parametrize("step", [residual_network(4, 1 << 10), transformer(2, 1 << 10)])
def test_cheap_layers_are_made_again(step: Lifetimes) -> None:
    plan = checkpoint(step, "cost")
    assert plan.actions == settled(step, by_cost(step))
    again = {
        step.ops[v.op].name for v, a in zip(step.values, plan.actions, strict=True) if a == "r"
    }
    assert again
    assert all(is_cheap(name) for name in again)
    costly = sum(op.time_s for op in step.ops if not is_cheap(op.name))
    assert plan.extra_s < costly / 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten.native_batch_norm.default", True),
        ("aten.relu_.default", True),
        ("aten._softmax.default", True),
        ("aten.native_dropout.default", True),
        ("aten.max_pool2d_with_indices.default", True),
        ("aten.mul.Tensor", True),
        ("aten.cat.default", True),
        ("aten.convolution.default", False),
        ("aten.addmm.default", False),
        ("aten.bmm.default", False),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", False),
        ("mine.layer.default", False),
    ],
)
def test_cheap_operators(name: str, expected: bool) -> None:
    assert is_cheap(name) == expected


@pytest.mark.parametrize("segments", ["0", "00", "-2", "half"])
def test_segments_that_are_none(segments: str) -> None:
    with pytest.raises(UsageError, match="segments"):
        CheckpointOptions(segments=segments)


def test_large_saved_values_are_moved() -> None:
    step = residual_network(4, 1 << 12)
    plan = chosen(offload_part(OffloadOptions(min_kib=1)), step)
    assert plan.actions == of_size(step, 1 << 10)
    for value, action in zip(step.values, plan.actions, strict=True):
        assert (action == OFFLOAD) == bool(value.uses and value.num_bytes >= 1 << 10)
    moved = sum(v.num_bytes for v, a in zip(step.values, plan.actions, strict=True) if a == OFFLOAD)
    assert simulate(step, plan.actions).moved_bytes == moved
    first = [min(use.unpacked for use in step.values[n].uses) for n in plan.fetch_order]
    assert first == sorted(first)
    assert len(first) == plan.actions.count(OFFLOAD)


def test_the_cheapest_that_fits_is_taken() -> None:
    seen = set()
    auto = cheapest(LaysaOptions())
    for seed in range(60):
        step = (random_chain, random_dag)[seed % 2](seed, 5)
        most = simulate(step, KEEP * len(step.values), SLOW_HOST).peak_bytes
        assert chosen(auto, step, Limits(most, SLOW_HOST)).strategy == "none"
        least = laysa(step, SLOW_HOST).peak_bytes
        budget = random.Random(seed).randint(least, most)
        plan = chosen(auto, step, Limits(budget, SLOW_HOST))
        assert plan.peak_bytes <= budget
        assert plan.extra_s <= laysa(step, SLOW_HOST, budget).extra_s
        seen.add(plan.strategy)
    assert {"none", "laysa"} < seen


def test_what_fits_by_no_strategy_is_refused() -> None:
    too_little = []
    for seed in range(20):
        step = random_chain(seed, 4)
        budget = laysa(step, SLOW_HOST).peak_bytes - 1
        try:
            plan = chosen(cheapest(LaysaOptions()), step, Limits(budget, SLOW_HOST))
        except DoesNotFit as error:
            too_little.append(error.smallest_bytes - budget)
        else:  # a rule may split layers, which are whole to laysa
            assert plan.peak_bytes <= budget
    assert len(too_little) > 10
    assert set(too_little) == {1}


def bucketings(count: int) -> list[tuple[int, ...]]:
    """Ways to send gradients in a row: the ends of messages."""
    return [
        (*cuts, count)
        for size in range(count)
        for cuts in itertools.combinations(range(1, count), size)
    ]


def sent_s(ends: tuple[int, ...], footprint: Footprint, step: Lifetimes) -> float:
    """A message begins when its last gradient is ready and takes 3 s and 1/2 s a byte."""
    free, begin = 0.0, 0
    for end in ends:
        sizes = [gradient.num_bytes for gradient in step.gradients[begin:end]]
        free = max(free, max(footprint.ready_s[begin:end])) + 3.0 + 0.5 * sum(sizes)
        begin = end
    return max(free, step.time_s[-1] + footprint.extra_s)


def planned_both_ways(step: Lifetimes, costs: Costs) -> tuple[float, float, float]:
    """Seconds of an iteration with both planned alone, planned jointly, and at best."""
    choices = ["".join(letters) for letters in itertools.product("kro", repeat=len(step.units))]
    found = {letters: simulate(step, spread(step, letters), costs) for letters in choices}
    peaks = sorted({footprint.peak_bytes for footprint in found.values()})
    budget = peaks[len(peaks) // 4]
    ways = bucketings(len(step.gradients))

    def planned(footprint: Footprint) -> tuple[int, ...]:
        return min(ways, key=lambda ends: sent_s(ends, footprint, step))

    untouched = found["k" * len(step.units)]
    joint = plan_jointly(
        lambda cost: laysa(step, costs, budget, cost),
        lambda plan: simulate(step, plan.actions, costs),
        planned,
        lambda ends, footprint: sent_s(ends, footprint, step),
        untouched,
    )
    assert joint.plan.peak_bytes <= budget
    footprint = simulate(step, joint.plan.actions, costs)
    assert joint.iteration_s == sent_s(joint.schedule, footprint, step)
    alone = simulate(step, laysa(step, costs, budget).actions, costs)
    assert joint.rounds_s[0] == sent_s(planned(untouched), alone, step)
    fitting = [footprint for footprint in found.values() if footprint.peak_bytes <= budget]
    best_s = min(sent_s(ends, footprint, step) for footprint in fitting for ends in ways)
    return joint.rounds_s[0], joint.iteration_s, best_s


def test_planned_jointly_is_better_than_each_alone() -> None:
    steps = [step for step in (random_chain(seed, 5) for seed in range(60)) if step.gradients]
    found = [planned_both_ways(step, Costs(host_bytes_per_s=12.0)) for step in steps]
    assert all(best_s - 1e-9 <= joint_s <= alone_s for alone_s, joint_s, best_s in found)
    better = sum(joint_s < alone_s - 1e-9 for alone_s, joint_s, _ in found)
    best = sum(math.isclose(joint_s, best_s) for _, joint_s, best_s in found)
    assert better > len(found) / 5
    assert best > len(found) * 0.8


def test_moments_at_which_gradients_are_ready_have_names() -> None:
    step = residual_network(2, 64)
    footprint = simulate(step, settled(step, RECOMPUTE * len(step.values)))
    ready = ready_s_by_name(step, footprint)
    assert list(ready) == [gradient.name for gradient in step.gradients]
    assert list(ready.values()) == sorted(ready.values())
    assert min(ready.values()) > 0.0
