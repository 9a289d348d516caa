"""What the host of a virtual machine disturbed does not count, whatever it measured."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from testbed.base.config import RunConfig
from testbed.base.plan import Plan
from testbed.noise import steal_time
from testbed.noise.steady import AT_LEAST, QUIET, quietest, steady_steps
from testbed.noise.steal_time import CoreTimes, StealTime
from testbed.records.cell import Cell
from testbed.reporting.aggregate import Found, aggregate
from testbed.reporting.cores import core_words, describe_counted
from testbed.training.summary import Outcome, make_cell

SHARES = st.lists(st.floats(0, 1), max_size=40)


@given(SHARES)
def test_what_lost_at_most_a_hundredth_always_counts(stolen: list[float]) -> None:
    counted = quietest(stolen)
    assert {i for i, share in enumerate(stolen) if share <= QUIET} <= set(counted)
    assert counted == sorted(counted)


@given(SHARES)
def test_enough_count_and_none_that_lost_more_than_one_left_out(stolen: list[float]) -> None:
    counted = quietest(stolen)
    left_out = set(range(len(stolen))) - set(counted)
    assert len(counted) >= min(len(stolen), max(AT_LEAST, len(stolen) / 3))
    assert all(stolen[i] < stolen[j] for i in counted for j in left_out)


def test_where_nothing_is_known_all_count() -> None:
    assert steady_steps([3.0, 1.0], []) == [3.0, 1.0]


def test_a_disturbed_step_is_left_out_though_it_was_fast() -> None:
    assert steady_steps([1.0, 2.0, 2.1, 2.2, 2.3], [0.2, 0.0, 0.01, 0.0, 0.0]) == [
        2.0,
        2.1,
        2.2,
        2.3,
    ]


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=40))
def test_unsteady_steps_count_only_where_too_few_are_steady(
    steps: list[tuple[float, bool]],
) -> None:
    stolen, unsteady = [share for share, _ in steps], [u for _, u in steps]
    chosen = steady_steps(range(len(steps)), stolen, unsteady)
    assert len(chosen) >= min(AT_LEAST, len(steps))
    if unsteady.count(False) >= AT_LEAST:
        assert not any(unsteady[step] for step in chosen)


def test_a_quiet_step_that_awaited_its_messages_does_not_take_a_steady_one_s_place() -> None:
    steps_s = [2.2, 1.60, 1.61, 1.7, 1.8, 2.6]
    stolen = [0.0, 0.02, 0.05, 0.09, 0.14, 0.0]
    unsteady = [True, False, False, False, False, True]
    assert steady_steps(steps_s, stolen, unsteady) == [1.60, 1.61, 1.7, 1.8]


def told(monkeypatch: pytest.MonkeyPatch, *stolen_s: float) -> list[int]:
    """The system counts ten more idle seconds at each reading, and these as stolen so far."""
    readings: list[int] = []

    def read() -> CoreTimes:
        readings.append(len(readings))
        return CoreTimes(0.0, 10.0 * len(readings), stolen_s[len(readings) - 1])

    monkeypatch.setattr(steal_time, "read_cores", read)
    return readings


def test_shares_are_from_one_call_to_the_next(monkeypatch: Any) -> None:
    told(monkeypatch, 1.0, 1.0, 11.0)
    taken = StealTime()
    assert (taken.share(), taken.share()) == (0.0, 0.5)


def test_a_machine_that_never_lost_anything_is_not_asked_again(monkeypatch: Any) -> None:
    readings = told(monkeypatch, 0.0, 5.0)
    taken = StealTime()
    assert taken.share() == 0.0
    assert len(readings) == 1


def test_what_is_too_short_to_tell_counts_as_undisturbed(monkeypatch: Any) -> None:
    readings = [CoreTimes(9.0, 0.0, 5.0), CoreTimes(9.0, 0.4, 5.1), CoreTimes(9.9, 0.4, 5.2)]
    monkeypatch.setattr(steal_time, "read_cores", lambda: readings.pop(0))
    taken = StealTime()
    assert (taken.share(), taken.share()) == (0.0, pytest.approx(0.1))


STEPS_S = [1.0, 9.0, 1.1, 1.0, 9.0, 1.2]
STOLEN = [0.0, 0.3, 0.0, 0.01, 0.2, 0.0]


def outcome(rank: int, stolen: list[float]) -> Outcome:
    return Outcome(
        rank=rank,
        step_time_s=STEPS_S,
        exposed_s=[t / 2 for t in STEPS_S],
        stolen=stolen,
        loss=[1.0] * len(STEPS_S),
        steps=len(STEPS_S),
        batch_size=1,
    )


def measured() -> Cell:
    """Of two ranks, each of which lost its cores in another step."""
    ranks = [[0.0, 0.3, 0.0, 0.01, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.2, 0.0]]
    return make_cell(
        RunConfig(backend="gloo"),
        [outcome(rank, stolen) for rank, stolen in enumerate(ranks)],
        plan=Plan(scheduler="x", names=(), num_elements=(), dtypes=(), messages=()),
        predicted_s=None,
        link=None,
        data="made up",
        consistency="bsp",
        num_servers=0,
        num_machines=1,
        environment={},
    )


def test_a_cell_tells_the_time_of_its_quiet_steps_and_keeps_all() -> None:
    cell = measured()
    assert cell.samples.cores_stolen == STOLEN
    assert cell.samples.step_time_s == STEPS_S
    assert cell.step_time_s == pytest.approx(1.05)
    assert (cell.compute_s, cell.exposed_comm_s) == pytest.approx((0.525, 0.525))
    assert cell.step_time_low_s is cell.step_time_high_s is None  # one run has no interval
    assert cell.step_time_unfiltered_s == pytest.approx(statistics.median(STEPS_S))


def test_repeats_are_put_together_by_their_quiet_steps() -> None:
    together = aggregate([Found("here", "one", measured()) for _ in range(2)])[0]
    assert together.step_time_s == pytest.approx(1.05)
    assert together.exposed_comm_s == pytest.approx(0.525)
    assert together.step_time_unfiltered_s == pytest.approx(statistics.median(STEPS_S))
    assert together.run_medians_s == pytest.approx([1.05, 1.05])


def test_a_report_says_how_many_steps_do_not_count() -> None:
    cell = measured()
    assert "4 of 6 steps, which lost at most 1.0 %" in core_words(
        replace(cell, cores_busy=0.5, cores_stolen=0.1)
    )
    assert any("2 of 6 steps of 1 runs do not count" in note for note in describe_counted([cell]))
