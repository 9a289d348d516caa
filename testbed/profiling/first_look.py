"""A first look at a link: what a byte of a large message costs, before anything is planned."""

from __future__ import annotations

import msgspec
import torch

from testbed.backends.protocol import Backend
from testbed.control.protocol import Control
from testbed.nouns import Request, Verb

KEY = "first look"
FIRST_BYTES = 256 << 10  # connects, allocates, and uses up what a shaper lets pass after a pause
TIMED_BYTES = 1 << 20


def first_look(
    backend: Backend, control: Control, *, deadline_s: float, device: str = "cpu"
) -> float:
    """Seconds per byte of one message of 1 MiB right behind a smaller one; collective.

    Good to a fifth or so, and enough to know how long a step's messages take: by that the measuring
    itself is paced. Of the ranks the mean, so that all pace alike.

    Args:
        backend: opened, with nothing under way; sums.
        control: the job's control plane.
        deadline_s: within which an exchange must be done.
        device: where the tensors are.

    Raises:
        RankLost, DeadlineExceeded: as `Work.wait` and `Control.all_gather`.
    """
    backend.submit(Request(Verb.BARRIER, key=f"{KEY}/begin", step=0)).wait(deadline_s)
    first, timed = (
        backend.submit(
            Request(
                Verb.SUM, torch.zeros(num_bytes // 4, device=device), key=f"{KEY}/{place}", step=0
            )
        )
        for place, num_bytes in enumerate((FIRST_BYTES, TIMED_BYTES))
    )
    for work in (first, timed):
        work.wait(deadline_s)
    mine = (timed.event.ended_s - first.event.ended_s) / TIMED_BYTES
    told = control.all_gather(KEY, msgspec.json.encode(mine), deadline_s, members=backend.size)
    return sum(msgspec.json.decode(each, type=float) for each in told) / backend.size
