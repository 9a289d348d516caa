"""The fast selection beside its plain twin."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.compression.selection import (
    above,
    above_plainly,
    largest,
    largest_by_counting,
    largest_plainly,
    sampled,
)
from testbed.memory.recording.record import Peak

LARGE = 200_000  # beyond one chunk of a scan and beyond what is selected without a sample


def normal(num_elements, seed=0):
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed))


LARGE_CASES = {
    "normal": normal(LARGE),
    "all equal": torch.full((LARGE,), -3.0),
    "all zero": torch.zeros(LARGE),
    "few values": normal(LARGE).round(),
    "mostly zero": normal(LARGE) * (normal(LARGE, 1) > 3),
    # The sample takes every hundredth element: these mislead it either way.
    "large where sampled": normal(LARGE).where(torch.arange(LARGE) % 100 == 0, 1e-3),
    "small where sampled": normal(LARGE).where(torch.arange(LARGE) % 100 != 0, 1e-3),
    "sorted": normal(LARGE).sort().values,
    "float64": normal(LARGE).double(),
    "bfloat16": normal(LARGE).bfloat16(),
    "float16": normal(LARGE).half(),
}


@given(values=st.lists(st.integers(-3, 3), max_size=60), share=st.floats(0, 1), half=st.booleans())
def test_exact_selection_of_small_tensors_with_ties(values, share, half):
    tensor = torch.tensor(values, dtype=torch.bfloat16 if half else torch.float32)
    count = round(share * len(values))
    assert torch.equal(largest(tensor, count), largest_plainly(tensor, count))


@pytest.mark.parametrize("name", LARGE_CASES)
@pytest.mark.parametrize("count", [0, 1, 7, 2000, 40_000, 150_000, LARGE - 1, LARGE])
def test_exact_selection_of_large_tensors(name, count):
    values = LARGE_CASES[name]
    assert torch.equal(largest(values, count), largest_plainly(values, count))


@pytest.mark.parametrize("name", LARGE_CASES)
@pytest.mark.parametrize("count", [1, 2000, 150_000, LARGE])
def test_selection_by_counting(name, count):
    values = LARGE_CASES[name]
    assert torch.equal(largest_by_counting(values, count), largest_plainly(values, count))


@pytest.mark.parametrize("name", LARGE_CASES)
@pytest.mark.parametrize("select", [largest, partial(sampled, offset=7)])
def test_selection_of_few_takes_no_memory_that_grows_with_the_tensor(name, select):
    """Whether or not the sample misleads: a copy of all magnitudes takes 20 times as much."""
    values = LARGE_CASES[name].repeat(20)
    watch = Peak([values])
    with watch:
        select(values, 1000)
    assert watch.peak_bytes < values.nbytes / 2


@pytest.mark.parametrize("name", LARGE_CASES)
@pytest.mark.parametrize("threshold", [0.5, 0.7, 3.0, 1e9, 1e39])
def test_scan(name, threshold):
    values = LARGE_CASES[name]
    assert torch.equal(above(values, threshold), above_plainly(values, threshold))


@pytest.mark.parametrize("name", LARGE_CASES)
@pytest.mark.parametrize("count", [1, 200, 2000, 40_000])
def test_sampled_selection_takes_about_as_many_and_the_largest(name, count):
    values = LARGE_CASES[name]
    for offset in (0, 37, 99):
        found = sampled(values, count, offset)
        assert int(0.8 * count) <= found.numel() <= 1.3 * count
        if name not in ("all equal", "all zero", "few values", "mostly zero"):
            # Up to ties, a threshold divides what is taken from what is not.
            left_out = values.abs().clone()
            left_out[found] = 0
            assert values[found].abs().min() >= left_out.max()


@given(num_elements=st.integers(0, 300), share=st.floats(0, 1), offset=st.integers(0, 99))
@settings(deadline=None)
def test_sampled_selection_of_small_tensors_is_exact(num_elements, share, offset):
    values = normal(num_elements, offset)
    count = round(share * num_elements)
    assert torch.equal(sampled(values, count, offset), largest_plainly(values, count))
