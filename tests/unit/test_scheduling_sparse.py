"""OMGS and LAGS: the papers' rules by hand, ours against enumeration; ratios in plans."""

import hashlib
import itertools
import random

import msgspec
import pytest

from testbed.base.errors import UsageError
from testbed.base.files import find_trace
from testbed.base.link import Link
from testbed.base.plan import decode_plan, encode_plan
from testbed.scheduling.lags import Layer, end_s, fair_ratios
from testbed.scheduling.omgs import SparseCost, exact_stops, omgs_stops
from testbed.scheduling.protocol import make_plan

LINK = Link(backend="mpi-ring", num_workers=4, latency_s=2**-10, seconds_per_byte=2**-30)
# Digests and files of plans before messages could carry a ratio; in dear's the reason has changed.
BEFORE = {
    "wfbp": ("a0245309dc99af43", "f49011cd90ed4d21"),
    "mg-wfbp": ("ade9c80c280f886d", "005a7d47414bf56c"),
    "p3": ("e90b5ea16f616fae", "45de529c8d6c72c4"),
    "dear": ("bf918eae5da9eb20", "beaefd4a556cddc8"),
}


@pytest.fixture(scope="module")
def trace():
    return find_trace("resnet50-v100")


@pytest.mark.parametrize("spec", BEFORE)
def test_plans_without_ratios_have_the_digests_and_files_of_before(spec, trace):
    plan = make_plan(spec, trace, LINK)
    digest, file = BEFORE[spec]
    assert plan.digest()[:16] == digest
    assert hashlib.sha256(encode_plan(plan)).hexdigest()[:16] == file


def test_a_ratio_is_part_of_digest_and_file(trace):
    plan = make_plan("omgs:ratio=0.02", trace, LINK)
    other = make_plan("omgs:ratio=0.02", trace, LINK)
    less = msgspec.structs.replace(
        plan, messages=tuple(msgspec.structs.replace(m, ratio=0.01) for m in plan.messages)
    )
    assert plan.digest() == other.digest() != less.digest()
    assert decode_plan(encode_plan(plan)) == plan
    bad = encode_plan(plan).replace(b'"ratio": 0.02', b'"ratio": 1.5', 1)
    with pytest.raises(UsageError, match=r"ratio 1.5; expected 0 < ratio <= 1"):
        decode_plan(bad)


def test_the_published_selection_time():
    cost = SparseCost.of(LINK, select_ns=0.219)
    assert cost.select_time_s(10**6) == pytest.approx(4.365e-3, rel=1e-3)


@pytest.mark.parametrize(("merged_exchange_s", "stops"), [(9.0, [1, 2]), (6.4, [2])])
def test_the_published_decision_on_two_layers(merged_exchange_s, stops):
    # t_w = 4 + 3.5 - 1 - 2 - 0 = 4.5 against t_save = 6 + 5 - merged
    select_s = {10: 1.0, 20: 2.0, 30: 3.5}.__getitem__
    exchange_s = {10: 6.0, 20: 5.0, 30: merged_exchange_s}.__getitem__
    assert omgs_stops([3, 4], [10, 20], select_s, exchange_s) == stops


def random_case(draw, count):
    sizes = [float(draw.randint(1, 40)) for _ in range(count)]
    backward_s = [draw.uniform(0, 5) for _ in range(count)]
    startup_s, per_s, scale = draw.uniform(0, 6), draw.uniform(0, 0.4), draw.uniform(0, 0.1)
    return sizes, backward_s, lambda p: scale * p**1.2, lambda p: startup_s + per_s * p


def as_published(backward_s, sizes, select_s, exchange_s):
    """Layer by layer in the paper's own terms, all times anew after each merge."""
    sizes, backward_s = list(sizes), list(backward_s)
    kept = [True] * len(sizes)

    def times():
        now_s = free_s = 0.0
        found = {}
        for i, size in enumerate(sizes):
            now_s += backward_s[i]
            if kept[i]:
                tau_s = now_s
                now_s += select_s(size)
                tau_c = max(free_s, now_s)
                free_s = tau_c + exchange_s(size)
                found[i] = (tau_s, tau_c)
        return found

    for i in range(len(sizes) - 1):
        tau_s, tau_c = times()[i]
        both = sizes[i] + sizes[i + 1]
        waits = backward_s[i + 1] + select_s(both) - select_s(sizes[i]) - select_s(sizes[i + 1])
        waits -= tau_c - tau_s - select_s(sizes[i])
        if waits < exchange_s(sizes[i]) + exchange_s(sizes[i + 1]) - exchange_s(both):
            kept[i], sizes[i + 1] = False, both
    return [i + 1 for i, each in enumerate(kept) if each]


def test_the_rule_in_one_pass_is_the_rule_as_published():
    draw = random.Random(1)
    merged = 0
    for _ in range(300):
        sizes, backward_s, select_s, exchange_s = random_case(draw, draw.randint(1, 9))
        found = omgs_stops(backward_s, sizes, select_s, exchange_s)
        assert found == as_published(backward_s, sizes, select_s, exchange_s)
        merged += len(found) < len(sizes)
    assert 50 < merged < 300


def end_of(stops, ready_s, sizes, select_s, exchange_s):
    selected_s = sent_s = 0.0
    for start, stop in itertools.pairwise([0, *stops]):
        size = sum(sizes[start:stop])
        selected_s = max(selected_s, ready_s[stop - 1]) + select_s(size)
        sent_s = max(sent_s, selected_s) + exchange_s(size)
    return sent_s


def test_exact_groups_end_as_early_as_any_groups_do():
    draw = random.Random(2)
    better = 0
    for _ in range(200):
        count = draw.randint(1, 8)
        sizes, backward_s, select_s, exchange_s = random_case(draw, count)
        ready_s = list(itertools.accumulate(backward_s))
        ends = [
            end_of([*cuts, count], ready_s, sizes, select_s, exchange_s)
            for k in range(count)
            for cuts in itertools.combinations(range(1, count), k)
        ]
        case = (ready_s, sizes, select_s, exchange_s)
        found_s = end_of(exact_stops(*case), *case)
        assert found_s == pytest.approx(min(ends), rel=1e-12)
        rule_s = end_of(omgs_stops(backward_s, sizes, select_s, exchange_s), *case)
        better += found_s < rule_s * 0.999
    assert better > 20


def test_fair_ratios_are_the_best_of_a_grid():
    """No grid point that ends in time has a larger smallest ratio, next smallest and so on."""
    draw = random.Random(3)
    grid = [0.1, 0.2, 0.3, 0.4, 0.5]
    for _ in range(60):
        ready_s = sorted(draw.uniform(0, 8) for _ in range(4))
        layers = [Layer(r, draw.uniform(0, 0.5), draw.uniform(1, 9)) for r in ready_s]
        found = fair_ratios(layers, 9.0, 0.1, 0.5)
        least_end_s = end_s(layers, [0.1] * 4)
        assert end_s(layers, found) <= max(9.0, least_end_s) + 1e-9
        for other in itertools.product(grid, repeat=4):
            if end_s(layers, other) <= max(9.0, least_end_s) - 1e-9:
                ours, theirs = sorted(found), sorted(other)
                first = next((i for i in range(4) if abs(ours[i] - theirs[i]) > 1e-9), None)
                assert first is None or ours[first] > theirs[first]


@pytest.mark.parametrize("hide", ["rest", "next"])
def test_lags_sends_more_where_more_can_be_hidden(trace, hide):
    thin = Link(backend="mpi-ring", num_workers=4, latency_s=1e-5, seconds_per_byte=4e-9)
    plan = make_plan(f"lags:hide={hide}", trace, thin)
    ratios = [m.ratio for m in plan.messages]
    assert all(0.001 <= r <= 0.25 for r in ratios)
    assert ratios[-1] == pytest.approx(0.001)
    wide_link = msgspec.structs.replace(thin, seconds_per_byte=4e-10)
    wide = make_plan(f"lags:hide={hide}", trace, wide_link)
    assert sum(m.ratio for m in wide.messages) > sum(ratios)


@pytest.mark.parametrize("spec", ["lags:least=0", "lags:least=0.2,most=0.1", "lags:most=0.6"])
def test_impossible_ratios_are_refused(spec, trace):
    with pytest.raises(UsageError, match=r"expected 0 < least <= most <= 0.5"):
        make_plan(spec, trace, LINK)
    with pytest.raises(UsageError, match=r"for 1 % write 0.01"):
        make_plan("omgs:ratio=1.5", trace, LINK)
    with pytest.raises(UsageError, match="select_ns is -1"):
        make_plan("omgs:select_ns=-1", trace, LINK)


@pytest.mark.parametrize(("hide", "told"), [("rest", "the rest of"), ("next", "the next layer's")])
def test_lags_tells_what_hides_its_messages(hide, told, trace):
    link = Link(backend="gloo", num_workers=4, latency_s=1e-5, seconds_per_byte=1e-9)
    assert make_plan(f"lags:hide={hide}", trace, link).reason.endswith(f"as {told} backward hides")
    empty = msgspec.structs.replace(trace, tensors=())
    assert make_plan(f"lags:hide={hide}", empty, link).reason == "nothing to send"
