"""The mirror weight update trains what error feedback in units of updates trains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from testbed.memory.strategy import KEEP_ALL, Strategy
from testbed.training.compressed.mirror import through_weights
from tests.harness.mirror_runs import (
    Trained,
    agree,
    cnn,
    difference,
    images,
    linear,
    mirror,
    squares,
    tokens,
    train,
)
from tests.harness.two_ranks import TwoBranches

STEPPED = {"gamma": 0.3}
LONG = [
    pytest.param("cnn", {"size": 3, "momentum": 0.9, **STEPPED}, id="cnn-3"),
    pytest.param("cnn", {"size": 1}, id="cnn-1"),
    pytest.param("bert-base", {"momentum": 0.9, **STEPPED, "scheduler": "bucket"}, id="bert"),
    pytest.param("gpt2", {"size": 3, **STEPPED, "scheduler": "bucket"}, id="gpt2-3"),
    pytest.param("gpt2", {"momentum": 0.9}, id="gpt2"),
]


@pytest.mark.parametrize(("model", "options"), LONG)
def test_200_steps_are_those_of_error_feedback(model: str, options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    start, loss_of = (cnn(), images) if model == "cnn" else tokens(model)
    runs = [train(s, start, loss_of, steps=200, **options) for s in (mirror(), KEEP_ALL)]
    agree(*runs)


@pytest.mark.parametrize("scheduler", ["sequential", "bucket", "p3", "dear", "bytescheduler"])
@pytest.mark.parametrize("where", ["device", "host"])
def test_whatever_the_messages_and_wherever_it_is_kept(scheduler: str, where: str) -> None:
    """Fused, cut, across the iteration; with Adam, over steps of two micro-batches."""
    options: dict[str, Any] = {
        "size": 2,
        "steps": 12,
        "scheduler": scheduler,
        "optimizer": torch.optim.Adam,
        "accumulate": 2,
    }
    agree(*(train(s, linear(), squares, **options) for s in (mirror(where=where), KEEP_ALL)))


@pytest.mark.parametrize(
    "inner",
    [
        "topk-sampled",
        "randomk:ratio=0.1",
        "gtopk:ratio=0.1",
        "oktopk:ratio=0.1,every=4",
        "threshold:value=0.01",
        "warmup:stage_steps=4+topk",
        "qsgd",
        "powersgd:rank=2,feedback=0",
        "by-size:min_elements=100+topk",
    ],
)
def test_any_compressor_within(inner: str) -> None:
    """Also those that go by magnitudes or keep something themselves, while the rate changes."""
    rates = {"steps": 60, "size": 2, "gamma": 0.3}
    runs = [train(s, linear(), squares, inner=inner, **rates) for s in (mirror(), KEEP_ALL)]
    for rank, weights in runs[0].weights.items():
        assert difference(weights, runs[1].weights[rank]) < 1e-12


def test_what_no_rank_uses_is_left_alone() -> None:
    """Weight decay does not touch it, and what another rank uses is not its."""

    def decaying(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, weight_decay=0.5)

    def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model.a.sum() * (1.0 + rank)

    options: dict[str, Any] = {"size": 2, "steps": 3, "optimizer": decaying}
    runs = [train(s, TwoBranches(), loss_of, **options) for s in (mirror(), KEEP_ALL)]
    agree(*runs)
    assert runs[0].weights[0][1].item() == 1.0
    assert runs[0].weights[0][0].item() < 1.0


# The trap: an update that is small beside the weights.


def tiny_steps(strategy: Strategy) -> Trained:
    return train(strategy, linear().float(), squares, steps=60, rate=2e-5)


def test_a_difference_keeps_updates_that_are_small_beside_the_weights() -> None:
    exact = train(KEEP_ALL, linear(), squares, steps=60, rate=2e-5)
    stored = tiny_steps(mirror())
    as_weights = tiny_steps(mirror(form="weights"))

    def off(trained: Trained) -> float:
        kept, expected = trained.kept[0], exact.kept[0]
        return difference([kept[key].double() for key in expected], list(expected.values()))

    def same(trained: Trained) -> float:
        return sum(torch.equal(i, exact.sent[k]) for k, i in trained.sent.items()) / len(exact.sent)

    assert off(stored) < 1e-5
    assert same(stored) == 1.0
    assert stored.notes == [""]
    assert off(as_weights) > 100 * off(stored)
    assert same(as_weights) < 0.9
    assert "lost" in as_weights.notes[0]
    for ours, theirs in zip(stored.losses, exact.losses, strict=True):
        assert ours == pytest.approx(theirs, rel=0.01)


def test_what_goes_through_weights_loses_exactly_what_is_told() -> None:
    draw = torch.Generator().manual_seed(1)
    weights, kept, given = (torch.randn(5000, generator=draw) for _ in range(3))
    kept, given = kept * 1e-5, given * 1e-5
    before = kept.double()
    added, lost = through_weights(kept, given, weights, 0.5, 0.25, kept)
    wanted = given.double() * 0.25 + before * 0.125
    assert float(added) == pytest.approx(float(given.double().abs().sum()) * 0.25, rel=1e-6)
    missing = (kept.double() * 0.25 - wanted).abs().sum()
    assert float(lost) == pytest.approx(float(missing), rel=1e-4)
    assert float(lost) > 1e-3 * float(added)


def test_in_float64_the_form_does_not_matter() -> None:
    runs = [train(mirror(form=f), linear(), squares, steps=40) for f in ("weights", "difference")]
    assert difference(runs[0].weights[0], runs[1].weights[0]) < 1e-9
