"""What the event record shows of schedulers that overlap: at once, overtaken, during forward."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace, TraceTensor
from testbed.base.types import Event, Op
from testbed.scheduling.protocol import make_plan
from tests.contracts.schedules import setup_of
from tests.contracts.specs import SCHEDULED, jobs
from tests.contracts.timing_cases import HUGE, LARGE, SMALL
from tests.harness.rank_pool import Job, PoolKeeper

CASES = "tests.contracts.timing_cases"
SEGMENT_BYTES = 16 * 1024
NUM_SEGMENTS = math.ceil(LARGE * 4 / SEGMENT_BYTES)


def two(num_ranks: int) -> bool:
    return num_ranks == 2


every_job = pytest.mark.parametrize("job", jobs(SCHEDULED, two))


def plan_for(spec: str, sizes: dict[str, int]) -> Plan:
    """A plan for branches that compute for a millisecond, on a link that takes much longer."""
    tensors = tuple(
        TraceTensor(name=f"{name}.weight", num_elements=size, forward_s=1e-3, backward_s=1e-3)
        for name, size in sizes.items()
    )
    trace = Trace(name="branches", device="cpu", batch_size=1, tensors=tensors)
    link = Link(backend="mpi-ring", num_workers=2, latency_s=1e-4, seconds_per_byte=1e-6)
    return make_plan(spec, trace, link)


@every_job
def test_asc_wfbp_has_two_messages_in_flight(job: Job, pools: PoolKeeper) -> None:
    plan = plan_for("asc-wfbp", {"b": LARGE, "a": LARGE})
    assert [message.channel for message in plan.messages] == [0, 1]
    setup = setup_of(plan, job.setup.num_channels)
    events, *_ = pools.with_setup(job, setup).run(f"{CASES}:two_at_once", plan, setup=setup)
    a, b = (next(e for e in events if e.key == f"{name}.weight") for name in "ab")
    assert a.channel != b.channel
    assert a.started_s < b.ended_s < a.ended_s
    assert overlap_s(a, b) > 0


def overlap_s(one: Event, other: Event) -> float:
    return min(one.ended_s, other.ended_s) - max(one.started_s, other.started_s)


@every_job
@pytest.mark.parametrize(
    ("spec", "most_ahead"),
    [
        ("pace:segment_kib=16,window=1", 1),
        ("bytescheduler:partition_kib=16,credit_kib=48", 3),
        (f"p3:slice_elements={SEGMENT_BYTES // 4}", 1),
    ],
)
def test_an_urgent_message_overtakes_at_a_segment(
    job: Job, spec: str, most_ahead: int, pools: PoolKeeper
) -> None:
    """The segment under way (or those chosen with the credit) ends; then the urgent one goes."""
    plan = plan_for(spec, {"early": SMALL, "late": LARGE})
    setup = setup_of(plan, job.setup.num_channels)
    everybody = pools.with_setup(job, setup).run(f"{CASES}:urgent_overtakes", plan, setup=setup)
    for rank, events in enumerate(everybody):
        in_order = sorted(events, key=lambda event: event.started_s)
        keys = [event.key for event in in_order]
        assert len(keys) == NUM_SEGMENTS + 1
        urgent = in_order[keys.index("early.weight")]
        segments = [event for event in in_order if event is not urgent]
        assert all(segment.key.startswith("late.weight[") for segment in segments)
        if rank == 0:
            assert urgent.submitted_s > max(segment.submitted_s for segment in segments)
        assert 1 <= keys.index("early.weight") <= most_ahead
        for one, other in combinations(in_order, 2):  # one at a time: nothing is cut short
            assert overlap_s(one, other) <= 0


@every_job
def test_dear_gathers_during_the_next_forward_pass(job: Job, pools: PoolKeeper) -> None:
    plan = plan_for("dear:mib=0.001", {"first": SMALL, "middle": LARGE, "last": HUGE})
    setup = setup_of(plan, job.setup.num_channels)
    everybody = pools.with_setup(job, setup).run(
        f"{CASES}:gathers_during_forward", plan, setup=setup
    )
    for rank, forwards in enumerate(everybody):
        late: list[bool] = []
        for forward in forwards:
            spread_s = {e.key: e.ended_s for e in forward.events if e.op is Op.SPREAD}
            fold_s = {e.key: e.ended_s for e in forward.events if e.op is Op.FOLD}
            assert set(spread_s) == set(fold_s) == {f"{n}.weight" for n in forward.began_s}
            for name, began_s in forward.began_s.items():  # no layer runs before its own has come
                assert spread_s[f"{name}.weight"] < began_s
            assert max(fold_s.values()) < forward.began_s["first"]
            late.append(forward.began_s["first"] < spread_s["last.weight"])
        assert rank != 0 or any(late)
