"""A rank that has ended its loop: where a step needs it, nobody waits for it."""

from __future__ import annotations

import pytest

from testbed.base.errors import RankLost
from testbed.control.inproc import InprocHub
from testbed.training.exchange.step_state import StepState


def steps_of(state: StepState, count: int) -> None:
    for _ in range(count):
        state.begin_exchange()
        state.end()


@pytest.mark.parametrize("steps", [0, 3])
def test_who_ends_with_as_many_steps_is_missed_by_nobody(steps: int) -> None:
    control = InprocHub(2).member(0)
    state = StepState(control, 10.0)
    steps_of(state, steps)
    state.hear_of_end(1, "rank 1", steps)
    assert control.loss is None


@pytest.mark.parametrize("hears_first", [True, False])
def test_a_further_step_gives_up_whoever_ended_first(hears_first: bool) -> None:
    """Two ranks have ended, one after the other; the news may come while this one waits."""
    control = InprocHub(3).member(0)
    state = StepState(control, 10.0)
    steps_of(state, 2)
    if not hears_first:
        state.begin_exchange()
    state.hear_of_end(1, "rank 1", 2)
    state.hear_of_end(2, "rank 2", 5)
    if hears_first:
        assert control.loss is None
        state.begin_exchange()
    assert control.loss is not None
    assert control.loss.who == "rank 1"
    with pytest.raises(RankLost, match="ended its training loop after 2 steps"):
        control.all_gather("order", b"", 10.0)
