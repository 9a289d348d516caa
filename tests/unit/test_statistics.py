"""Medians, quantiles, bootstrap intervals, efficiency."""

import statistics

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.statistics.summary import (
    bootstrap_median,
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
    assert bootstrap_median([]) is None
    assert bootstrap_median([[], [1.0]]) is None
    assert median_of_known([None, None]) is None


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_quantile_refuses_a_fraction_outside_its_range(fraction):
    with pytest.raises(ValueError, match="expected 0 <= fraction <= 1"):
        quantile([1.0], fraction)


def test_quantile_refuses_no_samples():
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)


@given(
    st.lists(st.lists(st.floats(0, 1e3), min_size=1, max_size=8), min_size=1, max_size=4).filter(
        lambda groups: sum(map(len, groups)) > 1
    )
)
@settings(max_examples=30)
def test_interval_lies_within_the_samples_and_repeats_itself(repeats):
    interval = bootstrap_median(repeats, num_resamples=50)
    pooled = [x for samples in repeats for x in samples]
    assert min(pooled) <= interval.low <= interval.high <= max(pooled)
    assert interval == bootstrap_median(repeats, num_resamples=50)


def test_interval_of_one_repeat_equals_scipys():
    samples = np.random.default_rng(3).exponential(size=60)
    ours = bootstrap_median([samples.tolist()], num_resamples=6000)
    theirs = scipy.stats.bootstrap(
        (samples,), np.median, n_resamples=6000, method="percentile", rng=4
    ).confidence_interval
    spread = theirs.high - theirs.low
    assert ours.low == pytest.approx(theirs.low, abs=0.1 * spread)
    assert ours.high == pytest.approx(theirs.high, abs=0.1 * spread)


def test_interval_holds_the_true_median_as_often_as_it_says():
    random = np.random.default_rng(11)
    held = 0
    for trial in range(300):
        samples = random.exponential(size=50).tolist()
        interval = bootstrap_median([samples], num_resamples=300, seed=trial)
        held += interval.low <= np.log(2) <= interval.high
    assert 0.90 <= held / 300 <= 0.99


def test_repeats_that_differ_widen_the_interval():
    random = np.random.default_rng(5)
    near = (1 + 0.01 * random.standard_normal(40)).tolist()
    far = (2 + 0.01 * random.standard_normal(40)).tolist()
    alike = bootstrap_median([near, near, near])
    unlike = bootstrap_median([near, far, far])
    assert unlike.high - unlike.low > 10 * (alike.high - alike.low)


@pytest.mark.parametrize("confidence", [0, 1, 95])
def test_interval_refuses_a_confidence_that_is_no_probability(confidence):
    with pytest.raises(ValueError, match=r"as 0\.95"):
        bootstrap_median([[1.0, 2.0]], confidence=confidence)


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
