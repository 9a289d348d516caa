"""A run that goes on from a checkpoint is the run, whatever memory strategy it has."""

from __future__ import annotations

import operator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import keystr, tree_leaves_with_path

from testbed.base.config import make_config
from tests.contracts.memory_cases import awkward, through_trainer
from tests.harness.two_ranks import on_ranks, plan_of

SPARSE = "ef:units=update+topk:ratio=0.05"
STEPS, HALF = 6, 3
SETTINGS = {"schedule": "cosine", "verify_steps": 0, "warmup": 0, "steps": STEPS}


class Part:
    """A run, or what is left of it after a checkpoint.

    Args:
        folder: that it saves to, at half of the run and at its end.
        size: ranks; those that are threads share a generator, so that several have no dropout.
        settings: of the run.
    """

    def __init__(self, folder: Path, size: int, **settings: Any) -> None:
        self.folder, self.size = folder, size
        config = make_config({**SETTINGS, **settings, "checkpoint": str(folder)})
        dropout = 0.3 if size == 1 else 0.0
        plan = plan_of(config.scheduler, awkward(0, 0.0).model)
        body = partial(through_trainer, plan=plan, config=config, dropout=dropout)
        self.losses = [outcome.loss for outcome, _ in on_ranks(body, size, plan.order)]

    def state(self, rank: int) -> dict[str, Any]:
        """All that was saved at the end."""
        path = self.folder / f"step-{STEPS:08d}" / f"rank-{rank}.pt"
        found: dict[str, Any] = torch.load(path, weights_only=True)
        if self.size > 1:  # ranks are threads, which seed the generator of the process in turn
            del found["random"]
        return found


def same(ours: Part, theirs: Part) -> None:
    """Parameters, buffers, the optimizer's state, residuals, random states and losses, bitwise."""
    for rank in range(ours.size):
        mine, other = (dict(tree_leaves_with_path(part.state(rank))) for part in (ours, theirs))
        assert mine.keys() == other.keys()
        for path, leaf in mine.items():
            equal = torch.equal if isinstance(leaf, torch.Tensor) else operator.eq
            assert equal(leaf, other[path]), keystr(path)
        assert ours.losses[rank] == theirs.losses[rank][-len(ours.losses[rank]) :]


def resumed(tmp_path: Path, size: int, memory: str, after: str, **settings: Any) -> Part:
    """The second half of a run whose first half had another strategy."""
    first = Part(tmp_path / "first", size, every=HALF, memory=memory, **settings)
    half = str(first.folder / f"step-{HALF:08d}")
    rest = Part(tmp_path / "rest", size, resume_from=half, memory=after, **settings)
    assert len(rest.losses[0]) == STEPS - HALF
    return rest


@pytest.mark.parametrize(
    ("memory", "compressor", "size", "settings"),
    [
        ("checkpoint", "none", 1, {}),
        ("offload:min_kib=0", "none", 1, {"accumulate": 2}),
        ("release", "none", 2, {"optimizer": "adam"}),
        ("laysa", "none", 1, {"accumulate": 2}),
        ("laysa", SPARSE, 2, {}),
        ("mirror", SPARSE, 2, {"scheduler": "dear"}),
        ("mirror:where=host", SPARSE, 2, {"optimizer": "adam"}),
        ("mirror:form=weights", SPARSE, 2, {}),
        ("offload+mirror:where=host,form=weights", SPARSE, 1, {"accumulate": 2}),
    ],
)
def test_resumed_equals_uninterrupted(
    memory: str, compressor: str, size: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """With momentum or Adam's moments, a cosine rate, running statistics and dropout."""
    settings = {**settings, "compressor": compressor}
    whole = Part(tmp_path / "whole", size, memory=memory, **settings)
    rest = resumed(tmp_path, size, memory, memory, **settings)
    same(rest, whole)
    assert any("momentum_buffer" in s or "exp_avg" in s for s in moments(whole))
    if compressor == SPARSE:
        states = whole.state(0)["compression"]["states"]["states"]
        assert any(state["residual"].count_nonzero() for state in states.values())


def moments(part: Part) -> list[dict[str, Any]]:
    return list(part.state(0)["optimizer"]["state"].values())


@pytest.mark.parametrize(
    ("memory", "after", "compressor"),
    [
        ("none", "laysa", "none"),
        ("laysa", "none", "none"),
        ("none", "laysa", SPARSE),
        ("laysa", "none", SPARSE),
        ("mirror", "mirror:where=host", SPARSE),
        ("mirror:where=host", "none", SPARSE),
        ("checkpoint", "offload+release", "none"),
    ],
)
def test_the_strategy_may_change(memory: str, after: str, compressor: str, tmp_path: Path) -> None:
    """One message for each tensor: the mirror rounds as the compressor does."""
    whole = Part(tmp_path / "whole", 1, compressor=compressor)
    rest = resumed(tmp_path, 1, memory, after, compressor=compressor)
    same(rest, whole)
