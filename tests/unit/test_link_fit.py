"""The fit finds the link that made the samples, whatever a few samples or one switch do."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.base.errors import UsageError
from testbed.base.files import decode_link, encode_link
from testbed.base.link import Link
from testbed.prediction.contention import SharedLink
from testbed.prediction.fit import fit_link, fit_slowdown
from testbed.prediction.rehearsal_fit import missing_s, ratios, with_missing

SIZES = [4096 << i for i in range(12)]
latencies = st.floats(1e-6, 1e-2)
slopes = st.floats(1e-10, 1e-7)
seeds = st.integers(0, 1 << 30)


def samples_of(cost, seed, *, noise=0.0, outliers=0.0, repeats=9, sizes=SIZES):
    """Times with multiplicative noise; some are disturbed and take much longer."""
    generator = random.Random(seed)

    def one(num_bytes):
        time_s = cost(num_bytes) * math.exp(noise * generator.gauss(0, 1))
        return time_s * generator.uniform(3, 50) if generator.random() < outliers else time_s

    return [(size, one(size)) for size in sizes for _ in range(repeats)]


@given(latencies, slopes)
@settings(max_examples=25, deadline=None)
def test_exact_times_give_back_the_line(latency_s, seconds_per_byte):
    link = fit_link("x", 4, [(m, latency_s + seconds_per_byte * m) for m in SIZES])
    assert link.pieces is None
    assert all(
        link.time_s(m) == pytest.approx(latency_s + seconds_per_byte * m, rel=1e-4) for m in SIZES
    )


@given(latencies, slopes, seeds)
@settings(max_examples=25, deadline=None)
def test_noise_and_outliers_do_not_move_the_line(latency_s, seconds_per_byte, seed):
    def cost(num_bytes):
        return latency_s + seconds_per_byte * num_bytes

    link = fit_link("x", 4, samples_of(cost, seed, noise=0.05, outliers=0.1))
    assert all(link.time_s(m) == pytest.approx(cost(m), rel=0.15) for m in SIZES)
    one_line = Link(
        backend="x",
        num_workers=4,
        latency_s=link.latency_s,
        seconds_per_byte=link.seconds_per_byte,
    )
    assert all(one_line.time_s(m) == pytest.approx(cost(m), rel=0.15) for m in SIZES)


@given(st.integers(4, 8), st.floats(2.0, 10.0), seeds)
@settings(max_examples=25, deadline=None)
def test_a_protocol_switch_is_found_where_it_is(position, jump, seed):
    latency_s, slope = 1e-4, 1e-9

    def cost(num_bytes):
        if num_bytes < SIZES[position]:
            return latency_s + slope * num_bytes
        return jump * (latency_s + slope * SIZES[position]) + slope * num_bytes

    link = fit_link("x", 4, samples_of(cost, seed, noise=0.03, outliers=0.05))
    assert link.pieces is not None
    assert any(
        p.max_bytes is not None and SIZES[position - 1] <= p.max_bytes < SIZES[position]
        for p in link.pieces
    )
    assert all(link.time_s(m) == pytest.approx(cost(m), rel=0.15) for m in SIZES)


def test_three_protocols_are_three_pieces():
    def cost(num_bytes):
        if num_bytes <= SIZES[3]:
            return 1e-5 + 1e-9 * num_bytes
        return 2e-4 + 8e-9 * num_bytes if num_bytes <= SIZES[7] else 4e-2 + 1e-9 * num_bytes

    link = fit_link("x", 4, samples_of(cost, 1, noise=0.01))
    assert link.pieces is not None
    assert len(link.pieces) == 3
    assert all(link.time_s(m) == pytest.approx(cost(m), rel=0.05) for m in SIZES)


def test_a_whole_size_that_was_disturbed_pulls_the_line_little():
    times = {m: 1e-4 + 1e-9 * m for m in SIZES}
    times[SIZES[5]] *= 20
    link = fit_link("x", 4, list(times.items()))
    others = [m for m in SIZES if m != SIZES[5]]
    assert all(link.time_s(m) == pytest.approx(times[m], rel=0.1) for m in others)


@given(slopes)
@settings(max_examples=15, deadline=None)
def test_neither_part_is_ever_negative(seconds_per_byte):
    faster_than_any_line = [(m, seconds_per_byte * m**1.2) for m in SIZES]
    falling = [(m, 1e-3 / math.log(m)) for m in SIZES]
    for samples in (faster_than_any_line, falling):
        link = fit_link("x", 4, samples)
        lines = [(link.latency_s, link.seconds_per_byte)]
        lines += [(p.latency_s, p.seconds_per_byte) for p in link.pieces or ()]
        assert all(a >= 0 and b >= 0 and a + b > 0 for a, b in lines)


def test_residuals_are_kept_and_survive_a_file():
    link = fit_link("gloo", 2, samples_of(lambda m: 1e-4 + 1e-9 * m, 3, noise=0.05, outliers=0.1))
    fit = link.extra["fit"]
    assert [row["num_bytes"] for row in fit["sizes"]] == SIZES
    row = fit["sizes"][4]
    assert row["fitted_s"] == link.time_s(SIZES[4])
    assert abs(row["relative_residual_median"]) < 0.15 < abs(fit["relative_residual_max"])
    assert decode_link(encode_link(link)) == link


def test_one_worker_pays_nothing():
    assert fit_link("x", 1, []).time_s(1 << 20) == 0


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "samples of 0 size"),
        ([(8, 1.0), (8, 2.0)], "samples of 1 size"),
        ([(8, 1.0), (16, 0.0)], "expected both above 0"),
        ([(8, 1.0), (16, math.inf)], "expected both above 0 and finite"),
        ([(0, 1.0), (16, 1.0)], "expected both above 0"),
    ],
)
def test_useless_samples_are_refused(samples, message):
    with pytest.raises(UsageError, match=message):
        fit_link("x", 2, samples)


@given(
    st.lists(st.floats(0.0, 1.5), min_size=3, max_size=3),
    st.integers(1 << 18, 1 << 24),
    seeds,
)
@settings(max_examples=40)
def test_slowdown_comes_back_from_what_it_did(steps, num_bytes, seed):
    truth = [1.0]
    for step in steps:
        truth.append(truth[-1] + step)
    link = Link(backend="x", num_workers=4, latency_s=1e-4, seconds_per_byte=1e-9)
    generator = random.Random(seed)
    samples = []
    for count in range(1, 5):
        shared: SharedLink[int] = SharedLink(lambda k: truth[k - 1])
        for message in range(count):
            shared.start(message, link.latency_s, num_bytes * link.seconds_per_byte)
        while len(shared):
            shared.advance(shared.next_s())
        samples += [(count, num_bytes, shared.now_s)] * 4
        samples.append((count, num_bytes, shared.now_s * generator.uniform(2, 30)))
    assert fit_slowdown(link, samples) == pytest.approx(truth, rel=1e-6)


def test_slowdown_is_at_least_one_and_never_falls():
    link = Link(backend="x", num_workers=2, latency_s=5.0, seconds_per_byte=1.0)
    samples = [(1, 10, 15.0), (2, 10, 12.0), (3, 10, 30.0), (4, 10, 25.0)]
    assert fit_slowdown(link, samples) == (1.0, 1.0, 2.5, 2.5)


def test_slowdown_needs_every_count():
    link = Link(backend="x", num_workers=2, latency_s=5.0, seconds_per_byte=1.0)
    with pytest.raises(UsageError, match="no time of 2 message"):
        fit_slowdown(link, [(1, 10, 15.0), (3, 10, 15.0)])


def test_the_sizes_of_a_step_are_met_more_closely_than_those_beside_them():
    # a bump that no three lines follow: the size that a step is full of decides
    sizes = [2.0**k for k in range(10, 24)]
    samples = [(m, 1e-4 + 1e-9 * m * (1.3 if m == 2.0**18 else 1.0)) for m in sizes]
    truth = dict(samples)
    plain = fit_link("x", 2, samples)
    known = fit_link("x", 2, samples, {2.0**18: 0.9})
    misses = [abs(link.time_s(2.0**18) / truth[2.0**18] - 1) for link in (plain, known)]
    assert misses[1] < 0.5 * misses[0]


def test_slow_messages_of_many_count_as_they_do_in_a_sum():
    samples = [(1e4, 1.0), (1e4, 2.0)] * 50 + [(1e6, 10.0)] * 3
    rows = fit_link("x", 2, samples).extra["fit"]["sizes"]
    assert rows[0]["time_s"] == pytest.approx(1.5)


def test_what_a_link_leaves_out_of_steps_becomes_start_up_of_every_piece():
    cost = lambda m: 1e-3 + 1e-8 * m if m < 1 << 18 else 5e-3 + 2e-9 * m  # noqa: E731
    link = fit_link("x", 4, [(m, cost(m)) for m in SIZES for _ in range(3)])
    assert link.pieces is not None
    step = [(m, link.time_s(m) + 2e-3) for m in SIZES]
    disturbed = [*step, (4096, 100.0)]
    missing = missing_s(link, [step, disturbed, step, []])
    assert len(missing) == 3
    whole = with_missing(link, missing)
    for m in SIZES:
        assert whole.time_s(m) == pytest.approx(link.time_s(m) + 2e-3)
    assert whole.latency_s == pytest.approx(link.latency_s + 2e-3)
    assert whole.seconds_per_byte == link.seconds_per_byte
    assert with_missing(link, []) == link
    assert with_missing(link, [-1.0]).latency_s == 0.0


def test_a_plans_messages_tell_by_how_much_a_link_is_off_all_together():
    link = fit_link("x", 4, [(m, 1e-3 + 1e-8 * m) for m in SIZES])
    messages = [(m, 0.8 * link.time_s(m)) for m in SIZES]
    assert ratios(link, [messages, [], messages]) == pytest.approx([0.8, 0.8])
    # one that is slower counts by what it adds to the sum
    first_s = messages[0][1]
    slower = [(messages[0][0], first_s + 1.0), *messages[1:]]
    whole_s = sum(link.time_s(m) for m in SIZES)
    assert ratios(link, [slower]) == pytest.approx([0.8 + 1.0 / whole_s])
