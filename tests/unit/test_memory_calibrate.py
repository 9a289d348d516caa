"""What operators take beside storages, and what of a process' memory is in use."""

from __future__ import annotations

import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from testbed.memory.recording.calibrate import OperatorSpec, calibrate
from testbed.memory.recording.tracker import ResidentPeak, allocated_from_c

ATEN = torch.ops.aten
MIB = 1 << 20


def test_what_does_not_run_with_made_up_values_is_named() -> None:
    square = torch.ones(256, 256)
    calls = [
        OperatorSpec(
            ATEN.cholesky.default, (square,), {}
        ),  # random numbers are not positive definite
        OperatorSpec(ATEN.cholesky.default, (square.t(),), {}),
        OperatorSpec(ATEN.add.Tensor, (square, square), {}),
    ]
    found, failed = calibrate(calls)
    assert list(found) == [calls[2].key]
    assert failed == ("aten.cholesky.default",)


def test_an_expanded_argument_is_made_up_too() -> None:
    """As in the backward pass of a mean: its elements share memory."""
    call = OperatorSpec(ATEN.div.Scalar, (torch.ones(64, 1).expand(64, 1024), 1024), {})
    found, failed = calibrate([call])
    assert call.key in found
    assert failed == ()


def test_that_there_is_no_memory_is_no_reason_to_estimate() -> None:
    with FakeTensorMode():
        call = OperatorSpec(ATEN.relu.default, (torch.empty(1 << 50),), {})
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        calibrate([call])


@pytest.mark.skipif(allocated_from_c() is None, reason="the C library does not tell")
def test_what_is_in_use_of_the_allocator_is_seen() -> None:
    before = allocated_from_c()
    assert before is not None
    with ResidentPeak() as watch:
        tensor = torch.ones(16 * MIB)
        end_s = time.monotonic() + 20.0
        while watch.allocated_bytes < before + 63 * MIB and time.monotonic() < end_s:
            time.sleep(1e-3)
        del tensor
    assert before + 63 * MIB < watch.allocated_bytes < before + 80 * MIB
    assert allocated_from_c() < before + 16 * MIB
