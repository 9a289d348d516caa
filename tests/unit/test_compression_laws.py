"""What holds for every compressor, whatever its name."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.base.errors import NonFiniteGradient, UsageError
from testbed.compression.common import num_bytes
from testbed.compression.protocol import Context
from testbed.compression.server_merge import merge
from testbed.compression.sparse import sparse_bytes, unpack_sparse
from tests.harness.compressors import (
    PLAIN,
    SPECS,
    WRAPPERS,
    job,
    keeping,
    messages,
    resolve_compressor,
)

RANKS = (1, 2, 3, 4)
DENSE_AT_FULL = (
    "topk:ratio=1",
    "topk-sampled:ratio=1",
    "randomk:ratio=1",
    "randomk:ratio=1,scale=1",
    "gtopk:ratio=1",
    "gtopk:ratio=1,residual=published",
    "oktopk:ratio=1",
    "dgc:ratio=1,momentum=0",
    "threshold:value=1e-30",
    "powersgd:rank=25",
    "acp-sgd:rank=25",
    "none",
)


def total(tensors):
    return torch.stack([t.double() for t in tensors]).sum(0)


def kept_in(state):
    return state["residual"] if "residual" in state else state["v"]


def imbalance(spec, num_workers, num_steps, dtype, num_elements=700, shapes=None):
    """Norm of given - sent - kept over all ranks and steps, relative to what was given."""
    ranks = job(spec, num_workers, **({} if shapes is None else {"shapes": shapes}))
    given_sum = torch.zeros(num_elements, dtype=torch.float64)
    sent_sum = torch.zeros(num_elements, dtype=torch.float64)
    scale = 0.0
    for step in range(num_steps):
        values = messages(num_workers, step, num_elements, dtype)
        done = ranks.exchange(values)
        given_sum += total(values)
        sent_sum += done[0].mean.double() * num_workers
        scale = max(scale, float(given_sum.norm()), float(sent_sum.norm()))
    kept = total([kept_in(state) for state in ranks.states])
    return float((given_sum - sent_sum - kept).norm()) / scale


def law_cases():
    for spec in SPECS:
        claims = resolve_compressor(spec).claims
        carries_momentum = spec == "dgc"  # given is then the velocity; see the examples
        for num_workers in RANKS if claims.mean_of_sent else RANKS[:1]:
            if "feedback=0" not in spec and not carries_momentum:
                yield keeping(spec), num_workers


@pytest.mark.parametrize(("spec", "num_workers"), list(law_cases()))
def test_what_was_sent_plus_what_is_kept_is_what_was_given(spec, num_workers):
    assert imbalance(spec, num_workers, 12, torch.float32) < 1e-6
    if "natural" not in spec:  # its codes are exponents of float32
        assert imbalance(spec, num_workers, 12, torch.float64) < 1e-12


@given(
    spec=st.sampled_from(sorted({spec for spec, _ in law_cases()})),
    num_workers=st.integers(1, 4),
    num_steps=st.integers(1, 30),
    num_elements=st.integers(1, 130),
)
@settings(max_examples=80, deadline=None)
def test_error_feedback_over_any_number_of_steps(spec, num_workers, num_steps, num_elements):
    if not resolve_compressor(spec).claims.mean_of_sent:
        num_workers = 1
    shapes = ((num_elements,),) if num_elements % 2 else ((2, num_elements // 2),)
    found = imbalance(spec, num_workers, num_steps, torch.float64, num_elements, shapes)
    assert found < 1e-12


@pytest.mark.parametrize("num_workers", RANKS)
@pytest.mark.parametrize("spec", SPECS)
def test_all_ranks_end_with_the_same_and_values_stay(spec, num_workers):
    ranks = job(spec, num_workers)
    for step in range(4):
        values = messages(num_workers, step)
        before = [v.clone() for v in values]
        done = ranks.exchange(values)
        for given_before, given_after, result in zip(before, values, done, strict=True):
            assert torch.equal(given_before, given_after)
            assert torch.equal(result.mean, done[0].mean)
        assert done[0].mean.shape == values[0].shape
        assert done[0].mean.dtype == values[0].dtype


@pytest.mark.parametrize("num_workers", RANKS)
@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_those_of_the_formula(spec, num_workers):
    ranks = job(spec, num_workers)
    before = [0] * num_workers
    for step in range(4):
        ranks.exchange(messages(num_workers, step))
        for rank in range(num_workers):
            context = Context(rank, num_workers, step, shapes=ranks.shapes)
            bounds = ranks.compressor.payload_bytes(700, 4, context)
            given_bytes = ranks.given_bytes[rank] - before[rank]
            assert bounds.least <= given_bytes <= bounds.most
        before = list(ranks.given_bytes)


# The other two hand over several payloads in a step, none of which is longer than a dense one.
@pytest.mark.parametrize("spec", [s for s in SPECS if "oktopk" not in s and "gtopk" not in s])
def test_a_payload_never_grows_beyond_the_dense_one(spec):
    compressor = resolve_compressor(spec)
    for num_elements, element_bytes in itertools.product((0, 1, 2, 3, 9, 64, 700), (2, 4, 8)):
        bounds = compressor.payload_bytes(num_elements, element_bytes, Context())
        assert bounds.most <= num_elements * element_bytes, (num_elements, element_bytes)


@pytest.mark.parametrize("num_workers", RANKS)
@pytest.mark.parametrize("spec", DENSE_AT_FULL)
def test_at_full_ratio_it_is_dense(spec, num_workers):
    ranks, dense = job(spec, num_workers), job("none", num_workers)
    for step in range(3):
        values = messages(num_workers, step, dtype=torch.float64)
        found, expected = ranks.exchange(values)[0].mean, dense.exchange(values)[0].mean
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_elements", [0, 1, 2, 5])
@pytest.mark.parametrize("spec", SPECS)
def test_empty_single_equal_and_zero_messages(spec, num_elements):
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for num_workers, dtype, fill in itertools.product((1, 3), dtypes, (0.0, -2.5)):
        ranks = job(keeping(spec), num_workers, shapes=((num_elements,),))
        for _ in range(2):
            values = [torch.full((num_elements,), fill, dtype=dtype)] * num_workers
            done = ranks.exchange(values)
            assert done[0].mean.shape == (num_elements,)
            assert done[0].mean.dtype == dtype
            assert bool(torch.isfinite(done[0].mean).all())
            if fill == 0 and "sign" not in spec:
                assert not done[0].mean.any()


@pytest.mark.parametrize("spec", SPECS)
def test_with_what_is_kept_equal_values_arrive(spec):
    """What a step lets fall of a constant message comes with a later one, or counts as kept."""
    ranks = job(keeping(spec), 2, shapes=((8,),))
    values = [torch.full((8,), -2.5)] * 2
    delivered = torch.zeros(8)
    for _ in range(80):
        delivered += ranks.exchange(values)[0].mean
    assert bool((delivered < 0).all()), delivered


@pytest.mark.parametrize("num_workers", RANKS)
def test_oktopk_of_few_elements_is_summed_as_it_is(num_workers):
    for num_elements in (0, 1, 3):
        ranks = job("oktopk", num_workers, shapes=((num_elements,),))
        values = messages(num_workers, 0, num_elements)
        dense = job("none", num_workers, shapes=((num_elements,),)).exchange(values)
        assert torch.equal(ranks.exchange(values)[0].mean, dense[0].mean)
        assert ranks.given_bytes == [4 * num_elements] * num_workers


@pytest.mark.parametrize("spec", ["threshold:value=3.0", "topk-sampled:ratio=0.02", "topk"])
def test_bytes_are_those_of_what_was_really_selected(spec):
    num_elements = 60_000
    ranks = job(spec, 2, shapes=((num_elements,),))
    for step in range(3):
        values = messages(2, step, num_elements)
        before = list(ranks.given_bytes) or [0, 0]
        done = ranks.exchange(values)
        for rank, result in enumerate(done):
            left = result.subtract_sent(values[rank].clone())
            selected = int((left != values[rank]).sum())
            if spec.startswith("threshold"):
                assert selected == int((values[rank].abs() >= 3.0).sum())
            expected = sparse_bytes(num_elements, selected, 4)
            assert ranks.given_bytes[rank] - before[rank] == expected


def test_bytes_of_dgc_are_those_of_what_was_really_selected():
    num_elements = 60_000
    ranks = job("dgc:ratio=0.02", 2, shapes=((num_elements,),))
    for step in range(3):
        before = list(ranks.given_bytes) or [0, 0]
        ranks.exchange(messages(2, step, num_elements))
        for rank, state in enumerate(ranks.states):
            selected = int((state["v"] == 0).sum())
            expected = sparse_bytes(num_elements, selected, 4)
            assert ranks.given_bytes[rank] - before[rank] == expected


def test_a_server_sends_back_no_more_than_the_union_of_the_selections():
    codec = resolve_compressor("topk:ratio=0.01").codec
    values = messages(4, 0, 60_000)
    parts = tuple(codec.encode(v, Context()).payload for v in values)
    union = torch.zeros(60_000, dtype=torch.bool)
    for part in parts:
        union[unpack_sparse(part, values[0])[0]] = True
    pulled, _ = merge(codec, parts, values[0], {}, Context())
    assert pulled.payload.numel() == sparse_bytes(60_000, int(union.sum()), 4)


@pytest.mark.parametrize("small", ["none", "bf16"])
def test_by_size_refuses_what_carries_the_momentum(small):
    with pytest.raises(UsageError, match=r"leave by-size out .* or give the compressor momentum=0"):
        resolve_compressor(f"by-size:small={small}+dgc")
    assert resolve_compressor("by-size+dgc:momentum=0").claims.keeps


@pytest.mark.parametrize("spec", [*SPECS, "ef+topk"])
def test_values_that_are_not_finite_are_refused_by_name(spec):
    for bad in (math.nan, math.inf, -math.inf):
        values = messages(1)[0]
        values[123] = bad
        with pytest.raises(NonFiniteGradient, match=r"'message' .* 1 .* step 0 on rank 0"):
            job(spec, 1).exchange([values])


@pytest.mark.parametrize("spec", SPECS)
def test_other_shapes_and_dtypes_are_refused(spec):
    for values in (torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(8)[::2]):
        with pytest.raises(UsageError, match="expected one contiguous dimension"):
            job(spec, 1, shapes=((values.numel(),),)).exchange([values])


@pytest.mark.parametrize("spec", SPECS)
def test_state_saved_and_restored_goes_on_alike(spec, tmp_path):
    spec = keeping(spec)
    ranks, again = job(spec, 2), job(spec, 2)
    for step in range(3):
        ranks.exchange(messages(2, step))
    torch.save(ranks.states, tmp_path / "states.pt")
    again.states, again.step = torch.load(tmp_path / "states.pt"), ranks.step
    for step in range(3, 6):
        left = ranks.exchange(messages(2, step))[0].mean
        assert torch.equal(left, again.exchange(messages(2, step))[0].mean)
    assert num_bytes(ranks.states[0]) >= 700 * 4


@pytest.mark.parametrize("spec", SPECS)
def test_draws_depend_on_seed_and_step_alone(spec):
    first, second = job(spec, 2), job(spec, 2)
    for step in range(2):
        left = first.exchange(messages(2, step))[0].mean
        assert torch.equal(left, second.exchange(messages(2, step))[0].mean)


def test_every_registered_compressor_is_under_these_laws():
    assert set(WRAPPERS) == {"ef", "warmup", "by-size"}
    assert set(PLAIN) <= set(SPECS)


def descend(spec, gradients_at, start, rate, num_steps):
    """Plain SGD from `start` on the mean of what each rank's gradient function gives."""
    point = torch.tensor(start, dtype=torch.float64)
    ranks = job(spec, len(gradients_at), shapes=((point.numel(),),))
    for _ in range(num_steps):
        values = [gradient(point) for gradient in gradients_at]
        point = point - rate * ranks.exchange(values)[0].mean
    return point


def test_scaled_signs_never_leave_a_line_unless_what_they_lost_is_kept():
    """f(x) = |x1 + x2| / 4 + |x1 - x2|: signs of its gradient are (1, -1) or (-1, 1) alone.

    Karimireddy et al., 2019, ICML: the sum of both coordinates stays as it was, for ever.
    """

    def gradient(x):
        along, across = torch.sign(x[0] + x[1]) / 4, torch.sign(x[0] - x[1])
        # 16 times both, so that codes are shorter than numbers.
        return torch.stack([along + across, along - across]).repeat(16)

    def sum_of_both(spec):
        end = descend(spec, [lambda x: gradient(x[:2])], [1.0, 0.5] * 16, 0.01, 2000)
        return abs(float(end[0] + end[1]))

    assert sum_of_both("sign:vote=0,scaled=1,bucket=0") == pytest.approx(1.5)
    assert sum_of_both("ef-sign:bucket=0") < 0.1


def test_the_largest_elements_alone_may_cancel_for_ever_unless_the_others_are_kept():
    """Two ranks whose largest elements are opposite: their sum is nothing, the others never go."""
    pulls = torch.zeros(64, dtype=torch.float64)
    pulls[0] = 10.0

    def ranks(sign):
        return lambda x: (x - 1.0).index_fill(0, torch.tensor([0]), 0.0) + sign * pulls

    gradients = [ranks(1.0), ranks(-1.0)]
    without = descend("topk:ratio=0.01", gradients, [0.0] * 64, 0.01, 3000)
    kept = descend("ef+topk:ratio=0.01", gradients, [0.0] * 64, 0.01, 3000)
    assert torch.equal(without, torch.zeros(64, dtype=torch.float64))
    assert float((kept[1:] - 1.0).abs().max()) < 0.1
