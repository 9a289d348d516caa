"""Where tensors lie in one allocation: never two on the same bytes, and with little room lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from testbed.base.errors import RunFailed, UsageError
from testbed.memory.running.arena import ALIGNMENT, Arena, ArenaPlan, Interval, aligned, assign

CPU = torch.device("cpu")
Draw = np.random.Generator


def chain(draw: Draw) -> list[Interval]:
    """Activations that wait for their backward pass, gradients beside them, scratch in between."""
    count = int(draw.integers(2, 50))
    found = []
    for i in range(count):
        size, at = int(draw.integers(1_000, 5_000_000)), 2 * count - i
        found.append(Interval(size, i, at))
        found.append(Interval(size, at - 1, at + 1))
        found.append(Interval(int(draw.integers(0, 2_000_000)), at, at + 1))
    return found


def dense(draw: Draw) -> list[Interval]:
    """DenseNet: every layer reads all before it in its block, each block at half the resolution."""
    found, made = [], []
    pixels, channels, moment = 56 * 56, 64, 0
    for num_layers in (6, 12, 48, 32):
        for _ in range(num_layers):
            made += [(moment, channels * pixels), (moment, 128 * pixels), (moment + 1, 32 * pixels)]
            channels, moment = channels + 32, moment + 2
        channels, pixels = channels // 2, pixels // 4
    for born, elements in made:
        again = 2 * moment - born
        found.append(Interval(4 * elements, born, again))
        found.append(Interval(4 * elements, again - 1, again + int(draw.integers(1, 4))))
    return found


def anything(draw: Draw) -> list[Interval]:
    count = int(draw.integers(1, 80))
    born = draw.integers(0, 100, count)
    dies = born + draw.integers(0, 40, count)
    sizes = draw.integers(0, 1_000_000, count)
    rows = zip(sizes.tolist(), born.tolist(), dies.tolist(), strict=True)
    return [Interval(*row) for row in rows]


def check(lifetimes: list[Interval], plan: ArenaPlan) -> None:
    """By looking at every moment."""
    most = 0
    for moment in sorted({it.born for it in lifetimes}):
        alive = [n for n, it in enumerate(lifetimes) if it.born <= moment < it.dies]
        most = max(most, sum(lifetimes[n].num_bytes for n in alive))
        ranges = sorted((plan.offsets[n], plan.offsets[n] + lifetimes[n].num_bytes) for n in alive)
        end = 0
        for low, high in ranges:
            assert low % ALIGNMENT == 0
            assert low >= end or low == high
            end = max(end, high)
        assert end <= plan.num_bytes
    assert plan.lower_bound_bytes == most <= plan.num_bytes


@pytest.mark.parametrize(("make", "num_seeds", "most"), [(chain, 8, 1.05), (dense, 1, 1.1)])
def test_nothing_overlaps_and_little_is_lost(make, num_seeds, most) -> None:
    for seed in range(num_seeds):
        lifetimes = make(np.random.default_rng(seed))
        plan = assign(lifetimes)
        check(lifetimes, plan)
        assert plan.num_bytes <= most * plan.lower_bound_bytes, seed
        assert plan == assign(lifetimes)


def test_random_lifetimes_never_overlap() -> None:
    lost = []
    for seed in range(12):
        lifetimes = anything(np.random.default_rng(seed))
        plan = assign(lifetimes)
        check(lifetimes, plan)
        lost.append(plan.fragmentation)
    assert max(lost) <= 0.1


def test_tensors_without_bytes_or_lifetime_take_no_room() -> None:
    assert assign([]) == ArenaPlan(0, (), 0)
    plan = assign([Interval(0, 0, 5), Interval(100, 3, 3)])
    assert (plan.num_bytes, plan.fragmentation) == (0, 0.0)
    with pytest.raises(UsageError, match="lifetime 1 is"):
        assign([Interval(1, 0, 1), Interval(1, 2, 1)])


def test_live_tensors_share_no_bytes() -> None:
    """Random takes and returns, some beyond the arena; each tensor keeps what was written to it."""
    for seed in range(20):
        draw = np.random.default_rng(seed)
        arena = Arena(8_000, CPU, poisons=bool(seed % 2))
        held: list[tuple[torch.Tensor, int]] = []
        for mark in range(120):
            if held and draw.random() < 0.5:
                tensor, written = held.pop(int(draw.integers(len(held))))
                assert (tensor == written).all()
                arena.give_back(tensor)
            else:
                dtype = (torch.float32, torch.float64, torch.int16)[int(draw.integers(3))]
                at = int(draw.integers(130)) * ALIGNMENT if draw.random() < 0.5 else None
                tensor = arena.take(int(draw.integers(0, 700)), dtype, at)
                held.append((tensor.fill_(mark), mark))
            assert arena.used_bytes == sum(aligned(t.nbytes) for t, _ in held)
        assert all((tensor == written).all() for tensor, written in held)
        assert arena.num_outside > 0
        for tensor, _ in held:
            arena.give_back(tensor)
        assert arena.used_bytes == 0 < arena.peak_bytes
        whole = arena.take(2_000, torch.float32)  # all of it can be had again
        arena.give_back(whole)


def test_a_free_place_that_was_asked_for_is_given() -> None:
    arena = Arena(256, CPU)
    first = arena.take(16, torch.float32, at=128)
    again = arena.take(16, torch.float32, at=128)  # it is taken
    assert first.data_ptr() - again.data_ptr() in (128, -64)
    assert arena.take(64, torch.float32).numel() == 64
    assert arena.num_outside == 1


def test_a_tensor_is_given_back_once() -> None:
    arena = Arena(256, CPU)
    tensor = arena.take(4, torch.float32)
    arena.give_back(tensor)
    for wrong in (tensor, torch.zeros(4)):
        with pytest.raises(RunFailed, match="does not hold it"):
            arena.give_back(wrong)


def test_who_still_holds_what_was_given_back_is_noticed() -> None:
    arena = Arena(256, CPU, poisons=True)
    for num_elements in (8, 800):  # in the arena, and beyond it
        tensor = arena.take(num_elements, torch.float32).zero_()
        arena.give_back(tensor)
        assert tensor.isnan().all()
    tensor = arena.take(8, torch.float32, at=64).zero_()
    arena.give_back(tensor)
    tensor[0] = 1.0
    with pytest.raises(RunFailed, match="bytes 64 to 96 of an arena were written to"):
        arena.take(8, torch.float32, at=64)
