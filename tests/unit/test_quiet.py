"""What the host of a virtual machine disturbed does not count, whatever it measured."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.statistics.quiet import AT_LEAST, QUIET, quiet_of, quietest
from testbed.training import cores
from testbed.training.cores import CoreTimes, StolenTime

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
    assert quiet_of([3.0, 1.0], []) == [3.0, 1.0]


def test_a_disturbed_step_is_left_out_though_it_was_fast() -> None:
    assert quiet_of([1.0, 2.0, 2.1, 2.2, 2.3], [0.2, 0.0, 0.01, 0.0, 0.0]) == [2.0, 2.1, 2.2, 2.3]


def told(monkeypatch: pytest.MonkeyPatch, *stolen_s: float) -> list[int]:
    """The system counts ten more idle seconds at each reading, and these as stolen so far."""
    readings: list[int] = []

    def read() -> CoreTimes:
        readings.append(len(readings))
        return CoreTimes(0.0, 10.0 * len(readings), stolen_s[len(readings) - 1])

    monkeypatch.setattr(cores, "read_cores", read)
    return readings


def test_shares_are_from_one_call_to_the_next(monkeypatch: Any) -> None:
    told(monkeypatch, 1.0, 1.0, 11.0)
    taken = StolenTime()
    assert (taken.share(), taken.share()) == (0.0, 0.5)


def test_a_machine_that_never_lost_anything_is_not_asked_again(monkeypatch: Any) -> None:
    readings = told(monkeypatch, 0.0, 5.0)
    taken = StolenTime()
    assert taken.share() == 0.0
    assert len(readings) == 1
