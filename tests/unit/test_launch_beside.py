"""A load beside a measurement: paced, and never in the way of its end."""

import threading

import pytest

from testbed.noise.rehearsal import beside


def test_a_paced_load_leaves_the_host_idle_in_between():
    begun, passed = threading.Event(), threading.Event()
    loads = []

    def load():
        loads.append(None)
        begun.set()

    def measure():
        begun.wait(60)
        passed.wait(0.05)  # how long it measures; time for many loads without a pace
        return "measured"

    assert beside(load, measure, every_s=600.0) == "measured"
    assert len(loads) == 1


def test_without_a_pace_loads_follow_each_other():
    third = threading.Event()
    loads = []

    def load():
        loads.append(None)
        if len(loads) == 3:
            third.set()

    assert beside(load, lambda: third.wait(60))
    assert len(loads) >= 3


def test_what_the_measurement_raises_comes_through():
    def measure():
        raise ValueError("no link")

    with pytest.raises(ValueError, match="no link"):
        beside(lambda: None, measure, every_s=600.0)
