"""What rehearsed steps make of a link, and when they are rehearsed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.launch.link_probe import NUM_TRIES, LinkProbe
from testbed.prediction.rehearsal_fit import fit_to_rehearsal

LINK = Link(backend="x", num_workers=2, latency_s=1.0, seconds_per_byte=0.5)
PLAN = Plan(scheduler="x", names=(), num_elements=(), dtypes=(), messages=())


def told(**extra: list[float]) -> Link:
    return msgspec.structs.replace(LINK, extra=extra)


def test_steps_that_agree_stretch_the_link_and_say_so() -> None:
    link = fit_to_rehearsal(told(in_steps=[1.2, 1.25, 1.25, 9.0]), by_message=False)
    assert (link.latency_s, link.seconds_per_byte) == (1.25, 0.625)
    assert link.extra["stretched"] == 1.25


def test_steps_that_disagree_or_are_few_leave_the_link_alone() -> None:
    for steps in ([1.2, 1.5, 1.9, 2.3], [1.2, 1.2, 1.2], []):
        given = told(in_steps=steps)
        assert fit_to_rehearsal(given, by_message=False) == given


def test_a_plan_by_priority_gets_what_is_missing_instead() -> None:
    link = fit_to_rehearsal(told(missing_s=[0.5], in_steps=[2.0] * 4), by_message=True)
    assert (link.latency_s, link.seconds_per_byte) == (1.5, 0.5)
    assert "stretched" not in link.extra


def tries(*rehearsals: list[float]) -> tuple[list[float], int]:
    """What is found where rehearsals show these ratios in turn, and how many it took."""
    coming = iter(rehearsals)
    asked = []

    def costs(plan: Plan, num_steps: int) -> list[list[tuple[int, float]]]:
        asked.append(num_steps)
        return [[(2, 2 * ratio)] for ratio in next(coming)]

    probe: Any = SimpleNamespace(_costs=costs)
    return LinkProbe._in_steps(probe, PLAN, LINK), len(asked)


def test_a_slow_moment_is_rehearsed_again() -> None:
    good, bad = [1.0, 1.0, 1.1, 1.1], [1.0, 1.5, 2.0, 2.5]
    assert tries(good) == (good, 1)
    assert tries(bad, good) == (good, 2)
    assert tries(bad, bad) == (bad, NUM_TRIES)


def test_steps_too_slow_to_rehearse_four_are_not_rehearsed_again() -> None:
    assert tries([]) == ([], 1)
    assert tries([1.0, 2.0]) == ([1.0, 2.0], 1)
