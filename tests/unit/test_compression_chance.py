"""What is claimed on average, or of the error of one message: by Monte Carlo and by the norm."""

import pytest
import torch

from tests.harness.compressors import SPECS, job, messages, resolve_compressor

NUM_DRAWS = 1500
UNBIASED = (
    *(spec for spec in SPECS if resolve_compressor(spec).claims.unbiased),
    "randomk:ratio=0.2,scale=1",
    "qsgd:bits=3,bucket=16",
    "terngrad:clip_sigmas=0,bucket=32",
)
CONTRACTING = tuple(spec for spec in SPECS if resolve_compressor(spec).claims.contraction)


def even(num_elements=40):
    """Magnitudes from 0.2 to 1 with both signs: no probability is too small to be seen."""
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64).repeat(num_elements // 4)
    return torch.linspace(0.2, 1, num_elements, dtype=torch.float64) * signs


def draws(spec, values, num_draws):
    """What one rank sends of the same values, in steps that draw anew: [draws, n]."""
    ranks = job(spec, 1, shapes=())
    return torch.stack([ranks.exchange([values])[0].mean for _ in range(num_draws)])


@pytest.mark.parametrize("spec", UNBIASED)
def test_the_mean_of_many_draws_is_what_was_given(spec):
    values = even()
    sent = draws(spec, values, NUM_DRAWS)
    error, spread = sent.mean(0) - values, sent.std(0) / NUM_DRAWS**0.5
    # Six standard errors for each of 40 values; where nothing is drawn, rounding alone.
    assert bool((error.abs() <= 6 * spread + 1e-6 * values.abs()).all())


@pytest.mark.parametrize("spec", ["terngrad:clip_sigmas=1", "topk:ratio=0.3", "onebit"])
def test_that_test_sees_a_bias(spec):
    values = even()
    sent = draws(spec, values, NUM_DRAWS)
    error, spread = sent.mean(0) - values, sent.std(0) / NUM_DRAWS**0.5
    assert not bool((error.abs() <= 6 * spread + 1e-6 * values.abs()).all())


@pytest.mark.parametrize("spec", CONTRACTING)
def test_the_error_contracts_as_claimed(spec):
    for seed, num_elements in enumerate((1, 2, 40, 700)):
        values = messages(1, seed, num_elements, torch.float64)[0]
        delta = resolve_compressor(spec).claims.contraction(values)
        assert 0 < delta <= 1
        errors = (draws(spec, values, 200) - values).square().sum(1)
        margin = 4 * float(errors.std()) / 200**0.5
        bound = (1 - delta) * float(values.square().sum())
        assert float(errors.mean()) <= bound + margin + 1e-12 * float(values.square().sum())


def test_the_claims_are_not_empty():
    assert {"natural", "qsgd", "none"} <= set(UNBIASED)
    assert {"topk", "topk-sampled", "randomk", "onebit", "natural"} <= set(CONTRACTING)


def test_qsgd_has_the_variance_of_its_paper():
    # E |Q(v) - v|^2 <= min(n / s^2, sqrt(n) / s) |v|^2 for each bucket of n.
    values = messages(1, num_elements=64, dtype=torch.float64)[0]
    for bits, bucket in ((2, 64), (4, 64), (4, 16)):
        levels = 2 ** (bits - 1) - 1
        errors = (draws(f"qsgd:bits={bits},bucket={bucket}", values, 300) - values).square().sum(1)
        bound = min(bucket / levels**2, bucket**0.5 / levels) * float(values.square().sum())
        assert float(errors.mean()) <= bound


def test_random_k_picks_every_element_equally_often():
    ones = torch.ones(50, dtype=torch.float64)
    often = draws("randomk:ratio=0.1", ones, NUM_DRAWS).sum(0)
    assert float(often.sum()) == 5 * NUM_DRAWS
    expected, deviation = NUM_DRAWS * 0.1, (NUM_DRAWS * 0.1 * 0.9) ** 0.5
    assert bool(((often - expected).abs() < 6 * deviation).all())


def test_ranks_draw_differently_where_they_must():
    values = messages(1)[0]
    for spec in ("qsgd", "terngrad", "natural"):
        alone = job(spec, 1).exchange([values])[0].mean
        together = job(spec, 2).exchange([values, values])[0].mean
        assert not torch.equal(alone, together)
