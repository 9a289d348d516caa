"""Corrects a fitted link by what messages took in rehearsed training steps; pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from testbed.base.link import Link
from testbed.prediction.emulated import stretched_link
from testbed.prediction.extrapolate import each_piece

AGREEMENT = 0.15
LEAST_AGREEING = 4  # steps; fewer cannot show whether they agree


def missing_s(link: Link, steps: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """For each step the mean time per message that the link does not account for, in seconds.

        d = sum of (t - (a + b M)) / number of messages

    Args:
        link: fitted to typical times.
        steps: bytes and seconds of the messages of each step; steps without messages are left out.

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
    """For each step the measured over the fitted time of all its messages together.

        r = sum of t / sum of (a + b M)

    Args:
        link: fitted to messages of other sizes, or in another order.
        steps: bytes and seconds of the messages of each step; steps without messages are left out.

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
    """The median of four ratios or more, if all but two are within 15 % of each other; else None.

    Steps that differ by more were disturbed by the host, so they say nothing about the plan.

    Args:
        ratios: of steps.

    Example:
        >>> agreed([1.02, 1.0, 1.04, 1.5]), agreed([1.2, 1.5, 1.9, 2.3]), agreed([0.5, 1.0, 9.0])
        (1.03, None, None)
    """
    if len(ratios) < LEAST_AGREEING:
        return None
    inner = sorted(ratios)[1:-1]
    middle = median(inner)
    return middle if inner[-1] - inner[0] <= AGREEMENT * middle else None


def fit_to_rehearsal(link: Link, *, by_message: bool) -> Link:
    """The link corrected by the rehearsed steps in its `extra`; unchanged without any.

    Args:
        link: fitted; `extra` holds `missing_s` (see `missing_s`) or `in_steps` (see `ratios`).
        by_message: raise the start-up time by the median of `missing_s` (see `with_missing`); else
            multiply start-up and time per byte by the factor on which `in_steps` agree (see
            `agreed`), which is kept as `stretched` in `extra`.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=1.0, seconds_per_byte=0.5,
        ...             extra={"in_steps": [1.0, 1.5, 1.5, 1.5]})
        >>> stretched = fit_to_rehearsal(link, by_message=False)
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
    """The link with its start-up time raised so that the messages of a step take what was measured.

        a' = max(0, a + median of d)

    A line through the typical time of each size leaves out rare slow messages, and a step is the
    sum of hundreds of messages. The difference is put into the start-up time; the time per byte
    stays.

    Args:
        link: fitted.
        missing: d of each step, as `missing_s` gives it; without any the link stays.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=1.0, seconds_per_byte=0.5)
        >>> with_missing(link, [0.5, 48.0, -0.25]).latency_s
        1.5
    """
    if not missing:
        return link
    added_s = median(missing)
    return each_piece(link, lambda a, b: (max(0.0, a + added_s), b))
