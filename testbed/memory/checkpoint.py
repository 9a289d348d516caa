"""Checkpointing: most activations are dropped, and made again segment by segment."""

from __future__ import annotations

import math
from dataclasses import dataclass

from testbed.base.errors import UsageError
from testbed.base.parts import PUBLISHED, Part
from testbed.memory.planning.lifetimes import KEEP, RECOMPUTE, Lifetimes
from testbed.memory.planning.plan import MemoryPlan, plan_of
from testbed.memory.planning.simulator import simulate
from testbed.memory.planning.units import is_cheap
from testbed.memory.strategy import Limits, Strategy

SQRT, COST = "sqrt", "cost"


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of `checkpoint`.

    Attributes:
        segments: `sqrt`, a whole number, or `cost`.
    """

    segments: str = SQRT

    def __post_init__(self) -> None:
        if self.segments not in (SQRT, COST) and not self.segments.isdecimal():
            raise UsageError(
                f"checkpoint: segments is {self.segments!r}; expected sqrt, cost or a whole number"
            )
        if self.segments.isdecimal() and int(self.segments) == 0:
            raise UsageError("checkpoint: segments is 0; expected 1 or more")


def checkpoint(options: CheckpointOptions) -> Strategy:
    """Keep what passes from one segment of the forward pass to the next; make the rest again.

        peak of L equal layers in s segments: s + L / s activations, least at s = sqrt(L)

    Segments are cut so that the bytes that autograd saves in them are equal. In the backward pass a
    segment is made again as a whole when the first of its activations is wanted, and each of them
    stays until its use; the last segment, which would be made again at once, is kept. With
    `segments=cost` there are no segments: what cheap operators made (activation, normalisation,
    pooling, sums) is made again from what the others (convolution, matrix product, attention)
    made, which stays.

    Random operators draw the same numbers again, running statistics are advanced once, and what is
    made again is what was there, bit for bit.

    Args:
        options: number of segments: `sqrt` of the number of layers, a whole number, or `cost`.

    Raises:
        UsageError: `segments` is none of them.

    Example:
        >>> checkpoint(CheckpointOptions(segments="4")).release is None
        True

    Reference:
        Chen, Xu, Zhang and Guestrin, 2016, arXiv:1604.06174; cost: Wang et al., 2018, PPoPP
        (SuperNeurons). Departs: on PyTorch's operators instead of layers, so that shortcuts and
        concatenations are cut as well; segments of equal saved bytes, not of equal length; the
        last one is kept, as by torch's `checkpoint_sequential`. SuperNeurons keeps joins, forks and
        concatenations, and recomputed tensors only where they fit under the layer that needs most;
        `cost` makes additions and concatenations again and keeps what was made until it was used.
    """

    def choose(lifetimes: Lifetimes, limits: Limits) -> MemoryPlan:
        if options.segments == COST:
            actions = by_cost(lifetimes)
            why = "what cheap operators made is made again"
        else:
            number = (
                max(1, round(math.sqrt(len(lifetimes.units))))
                if options.segments == SQRT
                else int(options.segments)
            )
            actions = in_segments(lifetimes, number)
            why = f"{number} segments; what passes between them stays"
        footprint = simulate(lifetimes, actions, limits.costs)
        text = f"checkpoint:segments={options.segments}"
        return plan_of(text, lifetimes, actions, footprint, why=why)

    return Strategy(choose=choose)


def in_segments(lifetimes: Lifetimes, number: int) -> str:
    """An action for each value: kept are those of the last segment or read by a later one.

    Args:
        lifetimes: of the step.
        number: of segments.
    """
    values = lifetimes.values
    saved = [value.num_bytes if value.uses else 0 for value in values]
    total, so_far = sum(saved), 0
    segment: list[int] = []  # of each value
    for size in saved:
        segment.append(min(number - 1, so_far * number // max(1, total)))
        so_far += size
    of_op = {value.op: segment[n] for n, value in enumerate(values)}
    crosses = {
        source for value in values for source in value.inputs if segment[source] < of_op[value.op]
    }
    last = number - 1
    return "".join(KEEP if s == last or n in crosses else RECOMPUTE for n, s in enumerate(segment))


def by_cost(lifetimes: Lifetimes) -> str:
    """An action for each value: made again are those of cheap operators."""
    return "".join(
        RECOMPUTE if is_cheap(lifetimes.ops[value.op].name) else KEEP for value in lifetimes.values
    )


CHECKPOINT = Part(
    name="checkpoint",
    summary="activations are dropped and made again in segments (segments)",
    origin=PUBLISHED,
    build=checkpoint,
    options=CheckpointOptions,
)
