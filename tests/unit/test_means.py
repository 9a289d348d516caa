"""What is wrong with a mean is found by one look at the device, however many there are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from testbed.base.errors import NonFiniteGradient
from testbed.training.exchange.update import all_zero, norms_of, refuse_non_finite


class Reads(TorchDispatchMode):
    """Counts values that are read one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.calls[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [2, 20])
def test_healthy_tensors_are_not_read_one_by_one(count: int) -> None:
    tensors = [torch.full((3,), float(i)) for i in range(count)]
    with Reads() as reads:
        norms = norms_of(tensors)
        assert all_zero(tensors, norms) == [0]
        refuse_non_finite([str(i) for i in range(count)], tensors, norms, step=0)
    assert reads.calls["aten._foreach_norm.Scalar"] == 1
    assert sum(reads.calls.values()) <= 4, reads.calls


def test_dtypes_may_differ_and_tensors_without_elements_are_not_silent() -> None:
    tensors = [torch.empty(0), torch.zeros(2, dtype=torch.float64), torch.ones(1).bfloat16()]
    assert all_zero(tensors, norms_of(tensors)) == [1]
    assert all_zero([], norms_of([])) == []


def test_a_norm_that_overflows_is_not_a_gradient_that_does() -> None:
    large = torch.full((4,), 3e38)
    refuse_non_finite(["w"], [large], norms_of([large]), step=0)
    for value, words in ((torch.nan, "NaN"), (torch.inf, "infinite values")):
        bad = torch.tensor([1.0, value])
        with pytest.raises(NonFiniteGradient, match=f"parameter of 'w' has {words} .* step 7"):
            refuse_non_finite(["w"], [bad], norms_of([bad]), 7, "parameter")


def test_a_sum_beyond_float16_says_what_to_do() -> None:
    total = sum(torch.full((2,), 20_000.0, dtype=torch.float16) for _ in range(4))
    assert isinstance(total, torch.Tensor)
    with pytest.raises(NonFiniteGradient, match=r"added in float16 before .* use bfloat16"):
        refuse_non_finite(["w"], [total / 4], norms_of([total / 4]), 0)
