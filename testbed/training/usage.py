"""Which parameters were used by any rank: those that were not keep no gradient and are skipped."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from testbed.backends.protocol import Backend, Work
from testbed.nouns import Request, Verb

KEY = "(parameters in use)"


def submit_votes(
    tensors: Sequence[int],
    absent: Collection[int],
    backend: Backend,
    step: int,
    device: torch.device,
) -> Work:
    """Ask, together with all other ranks, how many of them used each of these tensors."""
    votes = torch.tensor([0 if i in absent else 1 for i in tensors], dtype=torch.int32)
    if "cpu" not in backend.capabilities.device_types:
        votes = votes.to(device)
    return backend.submit(Request(Verb.SUM, votes, key=KEY, step=step, priority=-1))


def unused(tensors: Sequence[int], counts: torch.Tensor | None) -> set[int]:
    """The tensors that no rank used."""
    assert counts is not None
    return {i for i, count in zip(tensors, counts.tolist(), strict=True) if count == 0}
