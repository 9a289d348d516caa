"""Rings, two levels and doubling, played through in one thread without MPI."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.backends.mpi.backoff import CROWDED, ROOMY, backoff_for, next_sleep_s
from testbed.backends.mpi.flow import (
    Flow,
    chain_flow,
    choose_switch,
    cut,
    flat_groups,
    groups_of,
    plan_doubling,
    ring_flow,
    sum_flows,
)
from testbed.backends.mpi.options import RingOptions
from testbed.base.errors import UsageError
from testbed.base.types import Op, shard_bounds


def play(flows: list[Flow], tensors: list[list[int]]) -> int:
    """Run one flow per rank in lockstep; returns the number of elements sent by all ranks."""
    wires = [deque() for _ in flows]  # wires[r]: what travels towards rank r
    cursors = [0] * len(flows)
    sent = 0

    def send(rank: int, begin: int, end: int) -> None:
        nonlocal sent
        sent += end - begin
        wires[flows[rank].right].append((rank, tensors[rank][begin:end]))

    for rank, flow in enumerate(flows):
        for begin, end in flow.first:
            send(rank, begin, end)
    while any(wires):
        for rank, flow in enumerate(flows):
            if not wires[rank]:
                continue
            source, values = wires[rank].popleft()
            arrival = flow.arrivals[cursors[rank]]
            cursors[rank] += 1
            assert source == flow.left
            assert len(values) == arrival.end - arrival.begin
            span = slice(arrival.begin, arrival.end)
            old = tensors[rank][span]
            tensors[rank][span] = (
                [a + b for a, b in zip(old, values, strict=True)] if arrival.reduce else values
            )
            if arrival.forward:
                send(rank, arrival.begin, arrival.end)
    assert cursors == [len(flow.arrivals) for flow in flows]
    return sent


def tensors_of(size: int, num_elements: int) -> list[list[int]]:
    return [[1000**r * (i % 7 + 1) for i in range(num_elements)] for r in range(size)]


def total(tensors: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*tensors, strict=True)]


def run_verb(groups, size: int, tensors, segment: int, op: Op) -> int:
    plans = [sum_flows(groups, r, len(tensors[0]), segment, op) for r in range(size)]
    stages = list(zip(*plans, strict=True))
    return sum(play(list(stage), tensors) for stage in stages)


sizes = st.integers(1, 7)
elements = st.integers(0, 40)
segments = st.integers(1, 50)


@given(sizes, elements, segments)
def test_ring_sums_with_the_bytes_of_the_bound(size, num_elements, segment):
    tensors = tensors_of(size, num_elements)
    expected = total(tensors)
    sent = run_verb(flat_groups(size), size, tensors, segment, Op.ALL_REDUCE)
    assert all(tensor == expected for tensor in tensors)
    assert sent == 2 * (size - 1) * num_elements


grouped = st.tuples(st.integers(1, 3), st.integers(1, 3))


@given(grouped, elements, segments)
def test_two_levels_sum_and_own_the_same_shards_as_a_flat_ring(shape, num_elements, segment):
    num_hosts, per_host = shape
    size = num_hosts * per_host
    groups = groups_of([f"h{r % num_hosts}" for r in range(size)], None)
    tensors = tensors_of(size, num_elements)
    expected = total(tensors)
    run_verb(groups, size, tensors, segment, Op.FOLD)
    bounds = shard_bounds(num_elements, size)
    for rank, tensor in enumerate(tensors):
        own = slice(bounds[rank], bounds[rank + 1])
        assert tensor[own] == expected[own]
    run_verb(groups, size, tensors, segment, Op.SPREAD)
    assert all(tensor == expected for tensor in tensors)
    again = tensors_of(size, num_elements)
    run_verb(groups, size, again, segment, Op.ALL_REDUCE)
    assert again == tensors


def test_two_levels_send_between_hosts_only_one_share():
    groups = groups_of(["a", "a", "a", "b", "b", "b"], None)
    inside, between, _ = sum_flows(groups, 0, 600, 1000, Op.ALL_REDUCE)
    assert between.right == 3
    assert sum(end - begin for begin, end in between.sends) == 600 // 3
    assert {inside.left, inside.right} == {1, 2}


@given(st.integers(2, 6), st.integers(1, 40), segments)
def test_what_was_sent_is_overwritten_only_after_that_send(size, num_elements, segment):
    for rank in range(size):
        (flow,) = sum_flows(flat_groups(size), rank, num_elements, segment, Op.ALL_REDUCE)
        for arrival in flow.arrivals:
            if arrival.reduce:
                assert arrival.after is None
            else:
                assert flow.sends[arrival.after] == (arrival.begin, arrival.end)
        added = [a.reduce for a in flow.arrivals]
        assert added == sorted(added, reverse=True)


@given(sizes, st.data())
def test_chain_brings_the_roots_tensor_to_all(size, data):
    root = data.draw(st.integers(0, size - 1))
    tensors = tensors_of(size, 11)
    expected = list(tensors[root])
    sent = play([chain_flow(r, size, root, cut((0, 11), 4)) for r in range(size)], tensors)
    assert all(tensor == expected for tensor in tensors)
    assert sent == (size - 1) * 11


def test_ring_can_bring_unequal_parts_together():
    bounds = [(0, 3), (3, 3), (3, 10)]
    tensors = [
        [rank if b <= i < e else -1 for i in range(10)] for rank, (b, e) in enumerate(bounds)
    ]
    chunks = [cut(span, 2) for span in bounds]
    play([ring_flow(range(3), r, chunks, fold=False) for r in range(3)], tensors)
    assert all(tensor == [0] * 3 + [2] * 7 for tensor in tensors)


@pytest.mark.parametrize("size", range(1, 18))
def test_doubling_sums_once_on_every_rank(size):
    plans = [plan_doubling(rank, size) for rank in range(size)]
    held = [{rank} for rank in range(size)]
    for rank, plan in enumerate(plans):
        if plan.giver is not None:
            assert plans[plan.giver].taker == rank
            held[rank] |= held[plan.giver]
    num_rounds = max(len(plan.partners) for plan in plans)
    assert num_rounds == int(math.log2(size))
    for turn in range(num_rounds):
        before = [set(h) for h in held]
        for rank, plan in enumerate(plans):
            if plan.taker is None:
                partner = plan.partners[turn]
                assert plans[partner].partners[turn] == rank
                assert not before[rank] & before[partner]
                held[rank] = before[rank] | before[partner]
    everyone = set(range(size))
    assert all(held[r] == everyone for r, plan in enumerate(plans) if plan.taker is None)


def test_switch_is_the_last_size_before_the_ring_wins():
    timings = [(2, 1.0, 2.0), (4, 2.0, 2.0), (8, 3.0, 2.0), (16, 1.0, 2.0)]
    assert choose_switch(timings, at_least=1) == 4
    assert choose_switch(timings[2:], at_least=1) == 1
    left = iter(timings)  # measured as they are asked for, which takes long over a slow link
    choose_switch(left, at_least=1)
    assert list(left) == timings[3:]


def test_groups_of_unequal_size_are_refused_by_name():
    with pytest.raises(UsageError, match=r"unequal size \(a: 2, b: 1\).*levels=1"):
        groups_of(["a", "b", "a"], None)
    with pytest.raises(UsageError, match="unequal size"):
        groups_of(["a"] * 5, 2)


def test_options_are_checked_when_they_are_given():
    for wrong in (
        {"levels": 3},
        {"segment_kib": 0},
        {"segment_kib": 1 << 21},
        {"group_size": 2},
        {"switch_bytes": "much"},
    ):
        with pytest.raises(UsageError):
            RingOptions(**wrong)
    assert RingOptions(switch_bytes="64K").fixed_switch_bytes == 65536
    assert RingOptions().fixed_switch_bytes is None


def test_waiting_yields_first_then_sleeps_longer_and_longer_up_to_a_bound():
    assert backoff_for(2, 2) is ROOMY
    assert backoff_for(3, 2) is CROWDED
    assert CROWDED.yield_s < ROOMY.yield_s
    assert next_sleep_s(ROOMY, ROOMY.yield_s / 2, 0.0) == 0.0
    sleeps = [0.0]
    for _ in range(30):
        sleeps.append(next_sleep_s(CROWDED, 1.0, sleeps[-1]))
    assert sleeps == sorted(sleeps)
    assert sleeps[1] == CROWDED.shortest_s
    assert sleeps[-1] == CROWDED.longest_s
