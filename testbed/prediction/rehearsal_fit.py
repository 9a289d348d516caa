"""Brings a fitted link to what messages took in steps of training; pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from testbed.base.link import Link
from testbed.prediction.extrapolate import stretched_link

AGREEMENT = 0.15
LEAST_AGREEING = 4  # steps; of fewer nobody can say whether they agree


def missing_s(link: Link, steps: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """For each step the seconds that a link leaves out per message, in the mean.

        d = sum of (t - (a + b M)) / number of messages

    Args:
        link: fitted to typical times.
        steps: bytes and seconds of the messages of each step.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=1.0, seconds_per_byte=0.5)
        >>> missing_s(link, [[(2, 2.0), (4, 4.0)], [(2, 50.0)]])
        [0.5, 48.0]
    """
    return [
        sum(time_s - link.time_s(num_bytes) for num_bytes, time_s in step) / len(step)
        for step in steps
        if step
    ]


def ratios(link: Link, steps: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """For each step its messages' measured over their fitted time, all together.

        r = sum of t / sum of (a + b M)

    Args:
        link: fitted to messages of other sizes, or in another order.
        steps: bytes and seconds of the messages of each step.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=1.0, seconds_per_byte=0.5)
        >>> ratios(link, [[(2, 2.0), (4, 4.0)], []])
        [1.2]
    """
    return [
        sum(time_s for _, time_s in messages) / sum(link.time_s(size) for size, _ in messages)
        for messages in steps
        if messages
    ]


def agreed(ratios: Sequence[float]) -> float | None:
    """The median of four steps or more that agree, all but two of them, within 15 %; else None.

    Steps that differ by more tell of a disturbed host, not of the plan.

    Example:
        >>> agreed([1.02, 1.0, 1.04, 1.5]), agreed([1.2, 1.5, 1.9, 2.3]), agreed([0.5, 1.0, 9.0])
        (1.03, None, None)
    """
    if len(ratios) < LEAST_AGREEING:
        return None
    inner = sorted(ratios)[1:-1]
    middle = median(inner)
    return middle if inner[-1] - inner[0] <= AGREEMENT * middle else None


def as_in_steps(link: Link, *, by_message: bool) -> Link:
    """The link brought to what messages took in rehearsed steps, as its `extra` tells.

    By message its start-up is raised by `missing_s` (see `with_missing`); else start-up and time
    per byte are multiplied by the factor on which the steps of `in_steps` agree (see `agreed`),
    which is kept as `stretched`. Without what it needs the link stays.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=1.0, seconds_per_byte=0.5,
        ...             extra={"in_steps": [1.0, 1.5, 1.5, 1.5]})
        >>> stretched = as_in_steps(link, by_message=False)
        >>> stretched.latency_s, stretched.seconds_per_byte, stretched.extra["stretched"]
        (1.5, 0.75, 1.5)
    """
    if by_message:
        return with_missing(link, link.extra.get("missing_s", ()))
    factor = agreed(link.extra.get("in_steps", ()))
    if factor is None:
        return link
    extra = {**link.extra, "stretched": factor}
    return msgspec.structs.replace(stretched_link(link, factor), extra=extra)


def with_missing(link: Link, missing: Sequence[float]) -> Link:
    """The link whose messages take as long in a step, all together, as was seen.

        a' = max(0, a + median of d)

    A line through typical times of each size leaves out what happens to a message now and then, and
    a step is the sum of hundreds of them. What is added belongs to the start-up: the network's
    time per byte stays what it is.

    Args:
        link: fitted.
        missing: as `missing_s` gives it; without any the link stays.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=1.0, seconds_per_byte=0.5)
        >>> with_missing(link, [0.5, 48.0, -0.25]).latency_s
        1.5
    """
    if not missing:
        return link
    added_s = median(missing)
    pieces = link.pieces and tuple(
        msgspec.structs.replace(piece, latency_s=max(0.0, piece.latency_s + added_s))
        for piece in link.pieces
    )
    latency_s = max(0.0, link.latency_s + added_s)
    return msgspec.structs.replace(link, latency_s=latency_s, pieces=pieces)
