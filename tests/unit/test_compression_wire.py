"""Payloads: bits, indices, values; the fast ways beside the plain ones."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from testbed.base.errors import UsageError
from testbed.base.types import CUT_BYTES, Capabilities, Op, shard_bounds
from testbed.compression.bits import pack_codes, pack_codes_plainly, packed_bytes, unpack_codes
from testbed.compression.protocol import Cutting
from testbed.compression.server_merge import build, known_parts
from testbed.compression.sparse import (
    as_values,
    index_bytes,
    low_bits,
    pack_indices,
    pack_sparse,
    sparse_bytes,
    unpack_indices,
    unpack_sparse,
)
from testbed.compression.sparse_mean import SparseMerger, add_sparse, unite_few
from testbed.training.compressed.driver import for_servers

INT_BITS = 31  # of the widest code that an index needs


@st.composite
def codes(draw):
    width = draw(st.integers(0, INT_BITS))
    return width, draw(st.lists(st.integers(0, (1 << width) - 1), max_size=70))


@st.composite
def selections(draw):
    num_elements = draw(st.integers(0, 3000))
    count = draw(st.integers(0, num_elements))
    seed = draw(st.integers(0, 1 << 30))
    order = torch.randperm(num_elements, generator=torch.Generator().manual_seed(seed))
    return num_elements, order[:count].sort().values


@given(codes())
def test_codes_are_packed_as_plainly_and_come_back(case):
    width, numbers = case
    packed = pack_codes(torch.tensor(numbers, dtype=torch.int64), width)
    assert packed.tolist() == pack_codes_plainly(numbers, width)
    assert packed.numel() == packed_bytes(len(numbers), width)
    assert unpack_codes(packed, len(numbers), width).tolist() == numbers


@pytest.mark.parametrize("width", range(2, 9))  # one bit has one way for any number
def test_many_codes_are_packed_like_few(width):
    few = 1 << 13  # a whole number of groups of eight, so that pieces lie end to end
    draw = torch.Generator().manual_seed(width)
    many = torch.randint(1 << width, (10 * few + 3,), generator=draw)
    pieces = [pack_codes(piece, width) for piece in many.split(few)]
    packed = pack_codes(many, width)
    assert torch.equal(packed, torch.cat(pieces))
    assert torch.equal(unpack_codes(packed, many.numel(), width), many.to(torch.uint8))


@pytest.mark.parametrize("count", [1023, 1024, 1025, 1 << 16, (1 << 16) + 1])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_every_way_of_packing_is_the_plain_one(width, count):
    numbers = torch.randint(1 << width, (count,), generator=torch.Generator().manual_seed(width))
    packed = pack_codes(numbers, width)
    assert packed.tolist() == pack_codes_plainly(numbers.tolist(), width)
    assert torch.equal(unpack_codes(packed, count, width).to(torch.int64), numbers)


@pytest.mark.parametrize("count", [7, 1024, 1025, (1 << 16) + 1])
@pytest.mark.parametrize("width", [1, 3, 8, 12])
@pytest.mark.parametrize("surplus", [-1, 1])
def test_bytes_of_another_number_of_codes_are_refused(width, count, surplus):
    size = packed_bytes(count, width) + surplus
    with pytest.raises(ValueError, match=f"{size} bytes were given for {count} codes"):
        unpack_codes(torch.zeros(size, dtype=torch.uint8), count, width)


@given(selections())
@example((1 << 33, torch.tensor([5, 1 << 20, (1 << 33) - 1])))
@settings(max_examples=200, deadline=None)
def test_indices_come_back_in_the_bytes_of_the_formula(case):
    num_elements, indices = case
    packed = pack_indices(indices, num_elements)
    assert packed.numel() == index_bytes(num_elements, indices.numel())
    assert torch.equal(unpack_indices(packed, num_elements, indices.numel()), indices)


@given(num_elements=st.integers(1, 1 << 32), share=st.floats(0, 1))
def test_no_element_costs_more_than_8_bytes_or_all_more_than_dense(num_elements, share):
    count = int(share * num_elements)
    size = sparse_bytes(num_elements, count, 4)
    assert size <= min(8 * count, 4 * num_elements)


@given(selections(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@settings(max_examples=200, deadline=None)
def test_sparse_payloads_come_back_from_any_address(case, dtype):
    num_elements, indices = case
    like = torch.zeros(num_elements, dtype=dtype)
    selected = torch.arange(1, indices.numel() + 1).to(dtype)
    payload = pack_sparse(indices, selected, num_elements)
    assert payload.numel() == sparse_bytes(num_elements, indices.numel(), like.element_size())
    odd = torch.zeros(payload.numel() + 1, dtype=torch.uint8)[1:].copy_(payload)
    expected = like.clone().index_add_(0, indices, selected)
    assert torch.equal(add_sparse(like.clone(), odd), expected)
    if payload.numel() < like.numel() * like.element_size():
        assert torch.equal(unpack_sparse(odd, like)[0], indices)


@given(num_elements=st.integers(1, 500), element_bytes=st.sampled_from([2, 4, 8]))
def test_the_length_tells_the_number_of_elements(num_elements, element_bytes):
    sizes = [sparse_bytes(num_elements, k, element_bytes) for k in range(num_elements + 1)]
    sparse = [size for size in sizes if size < num_elements * element_bytes]
    assert sparse == sorted(set(sparse))
    assert set(sizes[len(sparse) :]) == {num_elements * element_bytes}


def test_lengths_that_fit_no_selection_are_refused():
    payload = pack_sparse(torch.tensor([3, 70]), torch.ones(2), 1000)
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]])):
        with pytest.raises(UsageError, match="is no selection from 1000 elements"):
            unpack_sparse(wrong, torch.zeros(1000))


def test_delta_form_is_used_below_a_quarter_and_a_bitmap_above():
    # About 2 + log2(n / k) bits for each index in the one form, n / k in the other.
    assert index_bytes(1 << 20, 1 << 14) < (1 << 20) // 8 // 6
    assert index_bytes(1 << 20, 1 << 19) == (1 << 20) // 8
    assert low_bits(1 << 20, 1 << 14) in (5, 6)


def test_values_are_viewed_and_only_copied_where_unaligned():
    payload = torch.ones(4).view(torch.uint8)
    assert as_values(payload, torch.zeros(4)).data_ptr() == payload.data_ptr()


@given(selections())
def test_a_server_packs_a_mean_without_loss(case):
    num_elements, indices = case
    mean = torch.zeros(num_elements)
    mean[indices] = torch.linspace(-1, 1, indices.numel()) * 1e-40  # denormal numbers too
    merger = SparseMerger()
    payload = merger.pack_mean(mean)
    assert torch.equal(merger.unpack_mean(payload, torch.zeros(num_elements)), mean)
    assert payload.numel() == sparse_bytes(num_elements, int((mean != 0).sum()), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_elements", "count"), [(1, 0), (64, 1), (2048, 21), (70_001, 701)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
def test_few_elements_are_united_in_rank_order(num_ranks, num_elements, count, dtype):
    """Sums that are not exact: another order of addition would give other bits."""
    draw = torch.Generator().manual_seed(num_ranks)
    like, payloads = torch.zeros(num_elements, dtype=dtype), []
    # Chosen from a few places only, so that most come more than once.
    places = torch.randperm(num_elements, generator=draw)[: 2 * count]
    for _ in range(num_ranks):
        order = torch.randperm(places.numel(), generator=draw)[:count]
        values = torch.randn(count, generator=draw, dtype=dtype)
        payloads.append(pack_sparse(places[order].sort().values, values, num_elements))
    few = count * num_ranks * 4 <= num_elements
    united = unite_few(tuple(payloads), like)
    assert (united is not None) == few
    expected = SparseMerger().unite_densely(tuple(payloads), like)
    assert torch.equal(SparseMerger().unite(tuple(payloads), like), expected)
    assert united is None or torch.equal(united, expected)


@given(selections(), st.lists(st.integers(0, 1 << 30), min_size=1, max_size=4))
def test_uniting_and_combining_are_as_plainly(case, seeds):
    num_elements, indices = case
    like = torch.zeros(num_elements)
    payloads, plain = [], torch.zeros(num_elements)
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        chosen = indices[torch.rand(indices.numel(), generator=draw) < 0.8]
        # Small whole numbers: some cancel, and a server does not send what has become 0.
        values = torch.randint(-2, 3, (chosen.numel(),), generator=draw).float()
        payloads.append(pack_sparse(chosen, values, num_elements))
        plain[chosen] += values
    plain /= len(seeds)
    merger = SparseMerger()
    assert torch.equal(merger.combine(tuple(payloads), like), plain)
    for unite in (merger.unite, merger.unite_densely):
        assert torch.equal(unite(tuple(payloads), like), merger.pack_mean(plain))


@given(
    num_elements=st.integers(1, 3000),
    density=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    num_ranges=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_ranges_of_a_payload_hold_what_the_whole_holds(num_elements, density, num_ranges, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_elements, generator=generator)
    values[torch.rand(num_elements, generator=generator) >= density] = 0.0
    places = values.nonzero().view(-1)
    whole = pack_sparse(places, values[places], num_elements)
    bounds = shard_bounds(num_elements, num_ranges)
    pieces = SparseMerger().cut(whole, values, bounds)
    ranges = [torch.zeros(high - low) for low, high in pairwise(bounds)]
    again = [add_sparse(like, piece) for like, piece in zip(ranges, pieces, strict=True)]
    assert torch.equal(torch.cat(again), values)


def test_only_large_messages_whose_payloads_can_be_cut_are_shared_by_servers():
    large, small = torch.zeros(CUT_BYTES // 4), torch.zeros(CUT_BYTES // 4 - 1)
    payload = pack_sparse(torch.tensor([7]), torch.tensor([1.0]), len(large))
    one, three = (Capabilities(frozenset({Op.MERGE}), num_mergers=n) for n in (1, 3))
    parts, notes = for_servers(SparseMerger(), payload, large, three, seed=0)
    assert [len(part) > 0 for part in parts] == [True, False, False]
    assert sum(build(note).num_elements for note in notes.split("\n")) == len(large)
    assert len(for_servers(SparseMerger(), payload, small, three, seed=0)[0]) == 1
    assert len(for_servers(SparseMerger(), payload, large, one, seed=0)[0]) == 1


@pytest.mark.parametrize("part", known_parts().values(), ids=known_parts())
def test_only_selections_are_cut(part: type) -> None:
    """Codes of a quantiser are not: they are no list of elements."""
    assert issubclass(part, Cutting) == issubclass(part, SparseMerger)
