"""The order of the forward pass, from the DAG or as a chain."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.base.errors import UsageError
from testbed.prediction.cross_iteration import describe_order, forward_order, predict, tails_s
from testbed.scheduling.protocol import make_plan
from tests.unit.crossing_cases import LINK_A, TRACE_A, trace_of

CHAIN = ((1,), (2,), (3,), (4,), ())
BRANCHES = ((1, 2), (3,), (3,), ())


def branchy(consumers=BRANCHES):
    return trace_of([1, 2, 3, 4], [4, 3, 2, 1], [8, 4, 2, 1], consumers)


def test_tails_of_the_chain():
    assert tails_s(TRACE_A) == [7, 5, 3, 2, 1]
    assert "chain" in describe_order(TRACE_A)


def test_a_dag_in_file_order_is_read_in_file_order():
    assert forward_order(branchy()) == [0, 1, 2, 3]
    assert tails_s(branchy()) == [15, 14, 12, 8]
    assert "DAG (1 tensors with several consumers)" in describe_order(branchy())


def test_a_dag_against_the_file_order_decides():
    trace = branchy(((), (0,), (1,), (0, 2)))
    assert forward_order(trace) == [3, 2, 1, 0]
    assert tails_s(trace) == [1, 3, 7, 15]


@pytest.mark.parametrize("scheduler", ["pace", "bytescheduler", "p3", "dear"])
def test_a_chain_written_as_a_dag_changes_nothing(scheduler):
    explicit = type(TRACE_A)(
        **{f: getattr(TRACE_A, f) for f in TRACE_A.__struct_fields__} | {"consumers": CHAIN}
    )
    plans = [make_plan(scheduler, trace, LINK_A) for trace in (TRACE_A, explicit)]
    assert plans[0].digest() == plans[1].digest()
    times = [predict(p, t, LINK_A) for p, t in zip(plans, (TRACE_A, explicit), strict=True)]
    assert times[0] == times[1]


@given(st.data())
def test_every_consumer_comes_after_its_producer(data):
    count = data.draw(st.integers(1, 7))
    order = data.draw(st.permutations(range(count)))
    consumers = [()] * count
    for rank, index in enumerate(order):
        later = order[rank + 1 :]
        consumers[index] = tuple(data.draw(st.sets(st.sampled_from(later)))) if later else ()
    trace = trace_of([1] * count, [1] * count, [1] * count, tuple(consumers))
    position = {index: rank for rank, index in enumerate(forward_order(trace))}
    assert sorted(position) == list(range(count))
    assert all(position[i] < position[c] for i in range(count) for c in consumers[i])
    tails = sorted(tails_s(trace), reverse=True)
    assert all(a - b == 1 for a, b in pairwise(tails))


@pytest.mark.parametrize(
    ("consumers", "words"),
    [
        (((1,), (0,), (3,), ()), "form a cycle through tensor 0"),
        (((1,), (9,), (3,), ()), "name tensor 9; expected indices 0 to 3"),
        (((1,), (2,)), "4 tensors and consumers of 2"),
    ],
)
def test_a_bad_dag_is_named(consumers, words):
    with pytest.raises(UsageError, match=words):
        forward_order(branchy(consumers))
