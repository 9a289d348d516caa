"""Medians, quantiles, efficiency."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.statistics.summary import (
    efficiency,
    median_of_known,
    most_common,
    quantile,
    summarise,
)

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(SAMPLES, st.floats(0, 1))
def test_quantile_equals_numpy(samples, fraction):
    assert quantile(samples, fraction) == pytest.approx(
        float(np.quantile(samples, fraction)), rel=1e-9, abs=1e-6
    )


@given(SAMPLES)
def test_summary_is_ordered(samples):
    summary = summarise(samples)
    assert summary.count == len(samples)
    assert min(samples) <= summary.p5 <= summary.median <= summary.p95 <= max(samples)


def test_no_samples_make_no_figures():
    assert summarise([]) is None
    assert median_of_known([None, None]) is None


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_quantile_refuses_a_fraction_outside_its_range(fraction):
    with pytest.raises(ValueError, match="expected 0 <= fraction <= 1"):
        quantile([1.0], fraction)


def test_quantile_refuses_no_samples():
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)


def test_efficiency_of_unknown_times_is_unknown():
    assert efficiency(None, 1.0) is None
    assert efficiency(1.0, None) is None
    assert efficiency(1.0, 0.0) is None
    assert efficiency(0.5, 1.0) == 0.5


@given(st.lists(st.sampled_from(["", "a", "b"]), max_size=9))
def test_most_common_counts_no_empty_values(values):
    known = [value for value in values if value]
    expected = statistics.mode(known) if known else ""
    assert most_common(values) == expected
