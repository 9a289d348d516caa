"""What others may import from the package itself; a change here is a change for users."""

from __future__ import annotations

import inspect

import pytest

import testbed
from testbed.base.axes import AXES, WORKLOADS


def test_the_public_names() -> None:
    assert testbed.__all__ == ["Session", "Workload", "distribute"]
    assert all(callable(getattr(testbed, name)) for name in testbed.__all__)


def test_another_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match="Session, Workload, distribute"):
        _ = testbed.distribution


def test_distribute_takes_a_part_of_each_axis_but_the_model() -> None:
    given = inspect.signature(testbed.distribute).parameters
    axes = [axis for axis in AXES if axis is not WORKLOADS]
    assert {axis.what: given[axis.what].default for axis in axes} == {
        axis.what: axis.default for axis in axes
    }
