"""The same operations on a CUDA device: equal to those on the CPU wherever nothing is drawn."""

import pytest
import torch

from testbed.compression.bits import pack_codes, unpack_codes
from testbed.compression.selection import above, largest, sampled
from tests.harness.compressors import SPECS, job, keeping, messages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

DRAWS_ON_THE_DEVICE = ("qsgd", "terngrad", "natural")


@pytest.mark.parametrize("spec", SPECS)
def test_means_and_states_are_those_of_the_cpu(spec):
    here, there = job(keeping(spec), 3), job(keeping(spec), 3)
    for step in range(4):
        values = messages(3, step)
        expected = here.exchange(values)
        found = there.exchange([v.cuda() for v in values])
        assert all(torch.equal(f.mean, found[0].mean) for f in found)
        assert found[0].mean.is_cuda
        if not any(name in spec for name in DRAWS_ON_THE_DEVICE):
            torch.testing.assert_close(found[0].mean.cpu(), expected[0].mean, rtol=1e-4, atol=1e-4)
    assert here.given_bytes == there.given_bytes


@pytest.mark.parametrize("num_elements", [1000, 9_000_000])
def test_selection_is_that_of_the_cpu(num_elements):
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(3))
    count = num_elements // 100
    assert torch.equal(largest(values.cuda(), count).cpu(), largest(values, count))
    assert torch.equal(sampled(values.cuda(), count, 7).cpu(), sampled(values, count, 7))
    assert torch.equal(above(values.cuda(), 2.0).cpu(), above(values, 2.0))


@pytest.mark.parametrize("width", [1, 3, 8, 23])
def test_packed_bits_are_those_of_the_cpu(width):
    codes = torch.randint(1 << width, (1001,))
    packed = pack_codes(codes, width)
    there = pack_codes(codes.cuda(), width)
    assert there.is_contiguous()
    assert torch.equal(there.cpu(), packed)
    assert torch.equal(
        unpack_codes(packed.cuda(), 1001, width).cpu(), unpack_codes(packed, 1001, width)
    )
