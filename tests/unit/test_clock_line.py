"""Clocks that are ahead and drift are aligned; the stated uncertainty covers what is wrong."""

from __future__ import annotations

import random
import threading

import pytest

from testbed.base.errors import DeadlineExceeded
from testbed.base.recorder import Asked, Recorder, fastest
from testbed.control import clocks
from testbed.control.inproc import InprocControl, InprocHub
from testbed.statistics.clock_line import FittedClock, fit_clock

AHEAD_S, DRIFT = 0.05, 50e-6
CASES = 100


def shown(true_s: float) -> float:
    """What a clock shows that is 50 ms ahead at 100 s and gains 50 ppm."""
    return true_s + AHEAD_S + DRIFT * (true_s - 100.0)


def exchange(chance: random.Random, true_s: float) -> Asked:
    """One over a way that takes 40 us there and 55 us back; jitter, and 1.4 ms now and then."""
    there_s = 40e-6 + chance.expovariate(1 / 60e-6) + 1.4e-3 * (chance.random() < 0.1)
    back_s = 55e-6 + chance.expovariate(1 / 30e-6) + 1.4e-3 * (chance.random() < 0.05)
    return shown(true_s), true_s + there_s, shown(true_s + there_s + back_s)


def case(seed: int) -> tuple[list[Asked], tuple[float, float]]:
    """Bursts before, during and after a training of 1 to 60 s, and its begin and end."""
    chance = random.Random(seed)
    length_s = chance.uniform(1.0, 60.0)
    begins = [100.0 + 0.03 * n for n in range(6)]
    begins += [100.5 + 0.4 * n for n in range(int(length_s / 0.4))]
    begins += [101.0 + length_s + 0.03 * n for n in range(6)]
    bursts = [fastest([exchange(chance, at + 3e-4 * n) for n in range(12)]) for at in begins]
    return bursts, (100.5, 100.5 + length_s)


def worst_s(line: FittedClock, window_s: tuple[float, float]) -> float:
    moments = [window_s[0] + part / 10 * (window_s[1] - window_s[0]) for part in range(11)]
    return max(abs(line.aligned(shown(t)) - t) for t in moments)


def fitted(seed: int) -> tuple[FittedClock, tuple[float, float]]:
    bursts, (begin_s, end_s) = case(seed)
    return fit_clock(bursts, (shown(begin_s), shown(end_s))), (begin_s, end_s)


def test_what_is_wrong_is_less_than_a_tenth_of_a_millisecond() -> None:
    wrong = [worst_s(*fitted(seed)) for seed in range(CASES)]
    assert max(wrong) < 1e-4


def test_the_uncertainty_covers_what_is_wrong_and_is_not_made_up() -> None:
    found = [fitted(seed) for seed in range(CASES)]
    covered = sum(worst_s(line, window) <= line.uncertainty_s for line, window in found)
    assert covered >= 95
    assert max(line.uncertainty_s for line, _ in found) < 5e-4


def test_a_wrong_sign_or_no_drift_would_be_noticed() -> None:
    line, window = fitted(3)
    assert line.offset_s == pytest.approx(AHEAD_S, abs=2e-3)
    assert line.drift == pytest.approx(DRIFT, rel=0.2)
    flat = FittedClock(line.offset_s, 0.0, line.at_s)
    assert worst_s(flat, window) > worst_s(line, window)


def test_one_slow_burst_among_ten_moves_little() -> None:
    bursts, window_s = case(7)
    few = bursts[:6] + bursts[-6:]
    asked, answered, came = few[3]
    few[3] = (asked, answered + 1.4e-3, came + 1.5e-3)  # all of its exchanges were held up one way
    line = fit_clock(few, (shown(window_s[0]), shown(window_s[1])))
    assert worst_s(line, window_s) < 1e-4


def test_more_spread_is_more_uncertainty_and_too_few_bursts_tell_none() -> None:
    bursts, window_s = case(11)
    noisy = [(a, t + 3e-4 * (-1) ** n, c) for n, (a, t, c) in enumerate(bursts)]
    assert fit_clock(noisy, window_s).uncertainty_s > 2 * fit_clock(bursts, window_s).uncertainty_s
    lone = fit_clock(bursts[:1], window_s)
    assert lone.drift == 0.0
    assert lone.uncertainty_s == pytest.approx((bursts[0][2] - bursts[0][0]) / 2)


def test_a_slow_answer_does_not_end_the_comparison_of_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SlowOnce(InprocControl):
        def __init__(self) -> None:
            super().__init__(InprocHub(2), rank=1)
            self.asked, self.went_on = 0, threading.Event()

        def time_exchange(self, timeout_s: float) -> Asked:
            self.asked += 1
            if self.asked == clocks.NUM_AT_ENDS * clocks.EXCHANGES + 1:
                raise DeadlineExceeded("rank 0 did not tell the time")
            if self.asked > (clocks.NUM_AT_ENDS + 2) * clocks.EXCHANGES:
                self.went_on.set()
            return super().time_exchange(timeout_s)

    monkeypatch.setattr(clocks, "EVERY_S", 0.001)
    control = SlowOnce()
    with clocks.ClockBursts(control, Recorder()):
        assert control.went_on.wait(20)
