"""Worked examples, checked by hand."""

import pytest
import torch

from testbed.base.errors import NonFiniteGradient
from testbed.compression import lowrank
from testbed.compression.common import count_of
from testbed.compression.gtopk import swaps_of
from testbed.compression.lowrank import blocks_of, orthonormal
from testbed.compression.protocol import Context
from tests.harness.compressors import job, messages


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def feed(spec, steps, num_workers=1, shapes=(), rates=None):
    """The means of all steps, and the job."""
    ranks = job(spec, num_workers, shapes)
    rates = rates or [None] * len(steps)
    means = [ranks.exchange(s, rate)[0].mean for s, rate in zip(steps, rates, strict=True)]
    return means, ranks


def test_counts_are_rounded_up_but_not_by_rounding_errors():
    assert [count_of(r, n) for r, n in ((0.07, 100), (0.29, 100), (1.0, 7), (1e-9, 5))] == [
        7,
        29,
        7,
        1,
    ]


@pytest.mark.parametrize(("units", "expected"), [("update", -3.0), ("gradient", -0.3)])
def test_error_feedback_in_units_of_updates_and_of_gradients(units, expected):
    # d = 2, k = 1: (3, 2) at rate 1, then 0 at rate 0.1.
    spec = f"ef:units={units}+topk:ratio=0.5"
    (first, second), _ = feed(spec, [[vector(3, 2)], [vector(0, 0)]], rates=[1.0, 0.1])
    weights = -(1.0 * first + 0.1 * second)
    assert weights[0] == -3.0
    torch.testing.assert_close(
        weights[1], torch.tensor(-2.0 if expected == -3.0 else -0.2, dtype=torch.float64)
    )


def test_virtual_iterate_follows_plain_descent():
    # w - mean of residuals is exactly what plain SGD on the same gradients would be.
    means, ranks = feed(
        "ef+topk:ratio=0.05", [messages(3, s, 40, torch.float64) for s in range(60)], 3
    )
    plain = sum(torch.stack(messages(3, s, 40, torch.float64)).mean(0) for s in range(60))
    kept = torch.stack([state["residual"] for state in ranks.states]).mean(0)
    torch.testing.assert_close(sum(means) + kept, plain, rtol=1e-12, atol=1e-12)


def test_dgc_momentum_correction_and_masking():
    steps = [[vector(1, 0.5)], [vector(0.2, 0.5)], [vector(0.2, 0.5)]]
    means, ranks = feed("dgc:ratio=0.5,momentum=0.9", steps)
    expected = [vector(1, 0), vector(0, 1.45), vector(0.58, 0)]
    for mean, wanted in zip(means, expected, strict=True):
        torch.testing.assert_close(mean, wanted)
    assert ranks.states[0]["u"][0] == 0
    assert ranks.states[0]["v"][0] == 0


def test_dgc_is_zero_where_it_sent_and_keeps_momentum_without_masking():
    for masking, zero in ((1, True), (0, False)):
        ranks = job(f"dgc:ratio=0.1,masking={masking}", 1)
        for step in range(3):
            sent = ranks.exchange(messages(1, step))[0].mean != 0
            assert not ranks.states[0]["v"][sent].any()
            assert bool((ranks.states[0]["u"][sent] == 0).all()) is zero


def test_dgc_clips_by_the_share_of_each_rank():
    (mean,), _ = feed("dgc:ratio=1,clip=1", [[vector(3, 4)] * 4], 4)
    torch.testing.assert_close(mean, vector(0.3, 0.4))


def test_dgc_warms_up_by_quarters():
    ranks = job("dgc:ratio=0.001,warmup_steps=1", 1, shapes=())
    sent = [int((ranks.exchange(messages(1, s, 4000))[0].mean != 0).sum()) for s in range(6)]
    assert sent == [1000, 250, 63, 16, 4, 4]


def test_warm_up_around_error_feedback():
    ranks = job("warmup:stage_steps=2,start=0.5,factor=0.1+ef+topk:ratio=0.01", 1, shapes=())
    sent = [int((ranks.exchange(messages(1, s, 1000))[0].mean != 0).sum()) for s in range(6)]
    assert sent == [500, 500, 50, 50, 10, 10]


def test_gtopk_four_ranks():
    vectors = [
        vector(9, 0, 1, 0, 4, 0),
        vector(0, 8, 0, 3, -5, 0),
        vector(2, 0, 0, 7, 0, -6),
        vector(0, -7, 0, 5, 1, 0),
    ]
    (mean,), ranks = feed("ef+gtopk:ratio=0.3", [vectors], 4)
    assert (mean * 4).tolist() == [9, 0, 0, 12, 0, 0]
    assert [state["residual"].tolist() for state in ranks.states] == [
        [0, 0, 1, 0, 4, 0],
        [0, 8, 0, 3, -5, 0],
        [2, 0, 0, 0, 0, -6],
        [0, -7, 0, 0, 1, 0],
    ]


def test_gtopk_published_rule_loses_what_survives_elsewhere():
    vectors = [vector(5, 0, 0), vector(0, 6, 0), vector(7, 0, 0), vector(0, 0, 1)]
    for rule, first in (("published", 0.0), ("conserving", 5.0)):
        (mean,), ranks = feed(f"ef+gtopk:ratio=0.3,residual={rule}", [vectors], 4)
        assert (mean * 4).tolist() == [7, 0, 0]
        assert ranks.states[0]["residual"].tolist() == [first, 0, 0]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 6, 7, 8, 11])
def test_gtopk_rounds_pair_up(num_workers):
    plans = [swaps_of(rank, num_workers) for rank in range(num_workers)]
    (num_rounds,) = {len(plan) for plan in plans}
    for number in range(num_rounds):
        for rank, plan in enumerate(plans):
            target = plan[number].sends_to
            assert target is None or plans[target][number].receives_from == rank


def test_powersgd_finds_a_matrix_of_its_rank_at_once():
    gradient = vector(1, 2, 2, 4)
    wide = torch.outer(torch.arange(1.0, 9), torch.arange(2.0, 8)).double().reshape(-1)
    (mean,), _ = feed("powersgd:rank=1", [[wide]], shapes=((8, 6),))
    torch.testing.assert_close(mean, wide)
    # 2 x 2 of rank 1 would not be shorter as factors, so it travels as it is.
    (mean,), ranks = feed("powersgd:rank=1", [[gradient]], shapes=((2, 2),))
    assert torch.equal(mean, gradient)
    assert ranks.given_bytes == [4 * 8]


def test_powersgd_reaches_the_best_approximation():
    draw = torch.Generator().manual_seed(5)
    matrix = torch.randn(30, 20, generator=draw, dtype=torch.float64) @ torch.diag(
        0.5 ** torch.arange(20, dtype=torch.float64)
    )
    ranks = job("powersgd:rank=3,feedback=0", 1, ((30, 20),))
    for _ in range(40):
        mean = ranks.exchange([matrix.reshape(-1)])[0].mean.view(30, 20)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    best = left[:, :3] @ torch.diag(values[:3]) @ right[:3]
    torch.testing.assert_close(mean, best, rtol=1e-8, atol=1e-8)


def test_acp_delivers_in_the_second_step_what_the_first_kept():
    # From Q = (1, 0, 0): P = first column; the rest stays, and travels with the next step.
    gradient = torch.outer(vector(1, 2, 3), vector(1, 2, 4))
    ranks = job("acp-sgd:rank=1", 1, ((3, 3),))
    ranks.states = [{"inner.right": vector(1, 0, 0)}]
    first = ranks.exchange([gradient.reshape(-1)])[0].mean.view(3, 3)
    torch.testing.assert_close(first[:, 0], gradient[:, 0])
    assert not first[:, 1:].any()
    second = ranks.exchange([torch.zeros(9, dtype=torch.float64)])[0].mean.view(3, 3)
    torch.testing.assert_close(first + second, gradient)
    assert float(ranks.states[0]["residual"].abs().max()) < 1e-12
    assert ranks.given_bytes == [3 * 8 + 3 * 8]


def test_low_rank_bytes_of_a_square_matrix():
    for spec, words in (("powersgd", 8000), ("acp-sgd", 4000), ("none", 1_000_000)):
        compressor = job(spec, 1).compressor
        bounds = compressor.payload_bytes(1_000_000, 4, Context(shapes=((1000, 1000),)))
        assert bounds.least == bounds.most == 4 * words


def test_long_slices_become_nearly_square_and_biases_stay():
    (slice_, bias) = blocks_of([(50_000,), (2048,)], 52_048, 4)
    assert (slice_.rows, slice_.cols, slice_.rank) == (223, 225, 4)
    assert (bias.rows, bias.rank) == (0, 0)


def test_orthonormal_columns_even_of_zero():
    for matrix in (torch.zeros(9, 3), torch.ones(9, 3), torch.randn(9, 3)):
        basis = orthonormal(matrix)
        torch.testing.assert_close(basis.T @ basis, torch.eye(3), rtol=1e-5, atol=1e-5)


def test_signs_by_majority_and_by_mean():
    values = [vector(3, -1, 2), vector(1, -1, -2), vector(-2, -1, 0)]
    (mean,), _ = feed("sign", [values], 3)
    assert mean.tolist() == [1, -1, 1]  # 0 counts as positive
    (mean,), _ = feed("sign", [values[:2]], 2)
    assert mean.tolist() == [1, -1, 0]
    (mean,), _ = feed("sign:vote=0,scaled=1", [[vector(3, -1, 2)]])
    assert mean.tolist() == [2, -2, 2]


def test_onebit_sends_the_mean_of_each_sign():
    (mean,), ranks = feed("ef+onebit", [[vector(3, -1, 2, 1, -4)]])
    assert mean.tolist() == [2, -2.5, 2, 2, -2.5]
    assert ranks.states[0]["residual"].tolist() == [1, 1.5, 0, -1, -1.5]


def test_natural_keeps_powers_of_two_and_halves_the_rest_between_them():
    exact = vector(1, -2, 0.25, 0, 2.0**-126, 2.0**127)
    (mean,), _ = feed("natural", [[exact]])
    assert torch.equal(mean, exact)
    (mean,), _ = feed("natural", [[torch.full((4000,), 3.0)]])
    assert set(mean.tolist()) == {2.0, 4.0}


def test_small_messages_by_size():
    ranks = job("by-size:min_elements=100,small=fp16+topk:ratio=0.1", 2, shapes=())
    ranks.exchange([torch.ones(99)] * 2)
    assert ranks.given_bytes == [198, 198]
    ranks.exchange(messages(2, 0, 100))
    assert ranks.given_bytes[0] - 198 < 60


def test_16_bits_are_averaged_before_they_overflow():
    (mean,), _ = feed("fp16", [[torch.full((3,), 60_000.0)] * 4], 4)
    torch.testing.assert_close(mean, torch.full((3,), 60_000.0), rtol=1e-3, atol=0)
    with pytest.raises(NonFiniteGradient, match=r"exceeds fp16.*use bf16"):
        feed("fp16", [[torch.full((3,), 70_000.0)]])
    # Halves fit, their sum does not.
    with pytest.raises(NonFiniteGradient, match=r"the mean over the ranks is above 65504"):
        feed("fp16", [[torch.full((3,), 1e5)] * 2], 2)
    (mean,), _ = feed("bf16", [[torch.full((3,), 1e30)] * 4], 4)
    torch.testing.assert_close(mean, torch.full((3,), 1e30), rtol=4e-3, atol=0)


def test_oktopk_moves_less_than_six_k_and_keeps_its_count():
    num_workers, num_elements, count = 4, 20_000, 200
    ranks = job("ef+oktopk:ratio=0.01,every=8,rebalance=8", num_workers, shapes=())
    sent = []
    for step in range(33):
        before = max(ranks.given_bytes or [0])
        done = ranks.exchange(messages(num_workers, step, num_elements))
        sent.append(int((done[0].mean != 0).sum()))
        # 3 k words at most leave a rank but at exact steps (5 bytes of an element: 5/4 words).
        if step % 8:
            assert max(ranks.given_bytes) - before < 3 * count * 4
    assert all(count / 2 <= k <= 2 * count for k in sent[1:])


def test_oktopk_finds_a_threshold_again_after_a_step_of_few_values():
    num_workers, num_elements, count = 4, 20_000, 200
    ranks = job("oktopk:ratio=0.01,every=32", num_workers, shapes=())
    ranks.exchange([torch.zeros(num_elements) for _ in range(num_workers)])
    for step in range(3):
        done = ranks.exchange(messages(num_workers, step, num_elements))
        assert int((done[0].mean != 0).sum()) <= 2 * count


def test_by_size_keeps_nothing_of_messages_that_are_small():
    ranks = job("by-size:min_elements=8+ef+topk:ratio=0.25", 1, shapes=())
    ranks.states = [{"residual": torch.ones(4)}]
    done = ranks.exchange([torch.ones(4)])
    assert torch.equal(done[0].mean, torch.ones(4))
    assert ranks.states == [{}]


def test_oktopk_keeps_what_a_full_region_cut_off():
    """A hot block fills whole regions, whose sums then travel densely, zeros among them."""
    draw = torch.Generator().manual_seed(3)
    spec, num_workers, num_elements = "ef+oktopk:ratio=0.01", 8, 20_000
    kept = torch.zeros(num_elements)
    ranks = job(spec, num_workers)
    for _ in range(8):
        given = [torch.zeros(num_elements) for _ in range(num_workers)]
        for one in given:
            one[1000:1200] = torch.randn(200, generator=draw)
        mean = ranks.exchange(given)[0].mean
        before, kept = kept, sum(state["residual"] for state in ranks.states)
        torch.testing.assert_close(
            num_workers * mean + kept, sum(given) + before, rtol=1e-5, atol=1e-4
        )


def test_gtopk_published_keeps_what_is_not_in_a_dense_result():
    given = [torch.full((64,), 10.0), torch.full((64,), 10.0), torch.ones(64)]
    given[0][63] = given[1][63] = given[2][5] = 0.1
    given[2][63] = 0.2
    ranks = job("ef+gtopk:residual=published,ratio=0.984", 3)
    mean = ranks.exchange(given)[0].mean
    assert mean[63] == 0
    assert ranks.states[2]["residual"][63] == pytest.approx(0.2)


@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_powersgd_of_float16_neither_overflows_nor_vanishes(size):
    draw = torch.Generator().manual_seed(1)
    low = torch.randn(256, 2, generator=draw) @ torch.randn(2, 256, generator=draw)
    matrix = (low / low.abs().mean() * size).half().view(-1)
    ranks = job("powersgd:rank=2,feedback=0", 4, ((256, 256),))
    for _ in range(5):
        mean = ranks.exchange([matrix] * 4)[0].mean
    assert float((mean - matrix).float().norm() / matrix.float().norm()) < 5e-3


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "acp-sgd:rank=2"])
def test_low_rank_factors_are_drawn_once(spec, monkeypatch):
    drawn = []
    ours = lowrank.first_factors
    monkeypatch.setattr(lowrank, "first_factors", lambda *a: drawn.append(1) or ours(*a))
    ranks = job(spec, 1, ((8, 8),))
    for step in range(4):
        ranks.exchange([messages(1, step, 64)[0]])
    assert len(drawn) == 1


def test_natural_of_float16_stays_finite():
    ranks = job("natural", 1)
    mean = ranks.exchange([torch.full((64,), 4e4, dtype=torch.float16)])[0].mean
    assert set(mean.tolist()) == {32768.0}
