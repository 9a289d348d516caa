"""Credit, slices and groups of bytescheduler, p3 and dear as their papers have them, by backend."""

from __future__ import annotations

import pytest
import torch

from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace, TraceTensor
from testbed.scheduling.protocol import make_plan
from testbed.training.exchange.setup import replanner

SERVERS = ("zmq-ps", "zmq-ps:servers=dedicated:2")
ALL_REDUCE = ("gloo", "mpi-ring", "mpi", "nccl", "loopback", "unknown-here", "")
MILLION = 1_000_000


def trace_of(**sizes: int) -> Trace:
    tensors = (
        TraceTensor(name=name.replace("__", "."), num_elements=n, forward_s=1.0, backward_s=1.0)
        for name, n in sizes.items()
    )
    return Trace(name="made up", device="cpu", batch_size=1, tensors=tuple(tensors))


def plan_on(backend: str, spec: str, trace: Trace) -> Plan:
    link = Link(backend=backend, num_workers=4, latency_s=1e-3, seconds_per_byte=1e-9)
    return make_plan(spec, trace, link)


def largest(plan: Plan) -> int:
    return max(part.stop - part.start for message in plan.messages for part in message.parts)


@pytest.mark.parametrize("backend", [*SERVERS, *ALL_REDUCE])
def test_bytescheduler_has_the_published_defaults_of_its_kind_of_backend(backend: str):
    plan = plan_on(backend, "bytescheduler", trace_of(w=20 * MILLION))
    partition, credit = (1, 4) if backend in SERVERS else (8, 16)
    assert largest(plan) == partition * MILLION
    assert plan.credit_bytes == 4 * credit * MILLION


def test_what_is_given_counts_on_every_backend():
    spec = "bytescheduler:partition_kib=1024,credit_kib=2048"
    plans = [plan_on(b, spec, trace_of(w=MILLION)) for b in (*SERVERS, *ALL_REDUCE)]
    assert {(largest(p), p.credit_bytes) for p in plans} == {(2**18, 2**21)}


@pytest.mark.parametrize("backend", [*SERVERS, *ALL_REDUCE])
def test_p3_waits_for_the_push_before_and_not_for_its_pull(backend: str):
    plan = plan_on(backend, "p3", trace_of(w=MILLION))
    assert largest(plan) == 50_000
    under_way = 0  # whole slices that are chosen while the bytes under way are below the credit
    while under_way == 0 or (plan.credit_bytes and under_way * 4 * 50_000 < plan.credit_bytes):
        under_way += 1
    assert under_way == (2 if backend in SERVERS else 1)


@pytest.mark.parametrize(("count", "credit"), [(1, None), (2, 40_001), (4, 120_001)])
def test_p3_can_be_told_how_many_slices_are_under_way(count: int, credit: int | None):
    spec = f"p3:slice_elements=10000,under_way={count}"
    assert plan_on("gloo", spec, trace_of(w=MILLION)).credit_bytes == credit


MODULES = {"a__weight": 3 << 18, "a__bias": 1 << 18, "b__weight": 2 << 18, "b__bias": 1 << 17}


@pytest.mark.parametrize(
    ("mib", "groups"),
    [
        (25, [{"a.weight", "a.bias", "b.weight", "b.bias"}]),
        (6.5, [{"b.weight", "b.bias"}, {"a.weight", "a.bias"}]),  # reaching it closes
        (6.51, [{"a.weight", "a.bias", "b.weight", "b.bias"}]),
        (1, [{"b.weight", "b.bias"}, {"a.weight", "a.bias"}]),  # a module is never cut
    ],
)
def test_dear_groups_whole_modules_below_its_threshold(mib: float, groups: list[set[str]]):
    plan = plan_on("gloo", f"dear:mib={mib}", trace_of(**MODULES))
    found = [{plan.names[part.tensor] for part in message.parts} for message in plan.messages]
    assert found == groups


@pytest.mark.parametrize("scheduler", ["bytescheduler", "p3"])
def test_a_plan_made_anew_in_training_is_for_the_same_kind_of_backend(scheduler: str):
    named = [("w", torch.empty(2 * MILLION, device="meta"))]
    for backend in (*SERVERS, *ALL_REDUCE):
        again = replanner(scheduler, named, backend)(["w"])
        assert again.messages == plan_on(backend, scheduler, trace_of(w=2 * MILLION)).messages
        assert again.credit_bytes == plan_on(backend, scheduler, trace_of(w=1)).credit_bytes
