"""What others may import from the package itself; a change here is a change for users."""

from __future__ import annotations

import pytest
import torch

import testbed
from testbed.base.errors import UsageError


def test_the_public_names() -> None:
    assert testbed.__all__ == ["Session", "Workload", "distribute"]
    assert all(callable(getattr(testbed, name)) for name in testbed.__all__)


def test_another_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match="Session, Workload, distribute"):
        _ = testbed.distribution


def test_distribute_refuses_what_is_no_axis() -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(UsageError, match=r"no argument of distribute 'shedule'.*scheduler"):
        testbed.distribute(model, torch.optim.SGD(model.parameters()), shedule="dear")
