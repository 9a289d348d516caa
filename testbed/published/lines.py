"""One published number beside the simulated one, and how settings of papers are simulated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from testbed.prediction.crossing import predict
from testbed.prediction.link import Link
from testbed.prediction.trace import Trace
from testbed.scheduling.protocol import make_plan

PUBLISHED_SCHEMA: Final = "testbed.published/1"
TIE: Final = 1e-6

Verdict = Literal["holds", "does not hold", ""]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A published number and ours.

    Attributes:
        paper: that it comes from.
        setting: model and network.
        quantity: in words; a gain is a ratio of times above 1 where the first one is faster.
        published: the number.
        simulated: ours.
        ratio: simulated over published.
        verdict: of an inequality (gain above or below 1, or a bound); empty = a mere value.
        reason: where an inequality does not hold: why, as far as we know.
    """

    paper: str
    setting: str
    quantity: str
    published: float
    simulated: float
    ratio: float
    verdict: Verdict = ""
    reason: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All lines, in the order of the papers."""

    schema: Literal["testbed.published/1"] = PUBLISHED_SCHEMA
    lines: tuple[Line, ...]


def value(paper: str, setting: str, quantity: str, published: float, simulated: float) -> Line:
    """A number that is no inequality."""
    return Line(
        paper=paper,
        setting=setting,
        quantity=quantity,
        published=published,
        simulated=simulated,
        ratio=simulated / published,
    )


def gain(
    paper: str,
    setting: str,
    quantity: str,
    published: float,
    simulated: float,
    reason: str,
    at_least: float = 1.0,
) -> Line:
    """An inequality: ours holds if it is on the published number's side of `at_least`.

    Equal times (within 1e-6) are not a gain.

    Args:
        paper: that it comes from.
        setting: model and network.
        quantity: in words.
        published: ratio.
        simulated: ratio.
        reason: for the case that it does not hold.
        at_least: 1 for "faster than"; else the bound that was published.

    Example:
        >>> gain("p", "s", "a over b", 1.2, 1.0, "tie").verdict
        'does not hold'
        >>> gain("p", "s", "a over b", 0.99, 1.0, "").verdict
        'holds'
    """
    ours, theirs = simulated - at_least > TIE, published - at_least > TIE
    if at_least != 1:
        ours, theirs = simulated >= at_least, True
    holds = ours == theirs
    return Line(
        paper=paper,
        setting=setting,
        quantity=quantity,
        published=published,
        simulated=simulated,
        ratio=simulated / published,
        verdict="holds" if holds else "does not hold",
        reason="" if holds else reason,
    )


def iteration_s(spec: str, trace: Trace, link: Link, believed: Link | None = None) -> float:
    """Seconds of an iteration, planned for the link or for another that the planner believes in."""
    return predict(make_plan(spec, trace, believed or link), trace, link).iteration_s


def with_totals(
    trace: Trace, forward_s: float, backward_s: float, dtype: str | None = None
) -> Trace:
    """The trace with other totals, in the same shares, and its gradients perhaps in another dtype.

    Example:
        >>> from testbed.prediction.shipped import load_shipped_trace
        >>> trace = with_totals(load_shipped_trace("resnet50-v100"), 1.0, 2.0, "float16")
        >>> round(trace.backward_s, 9), trace.num_bytes
        (2.0, 51114064)
    """
    forward, backward = forward_s / trace.forward_s, backward_s / trace.backward_s
    return msgspec.structs.replace(
        trace,
        tensors=tuple(
            msgspec.structs.replace(
                tensor,
                forward_s=tensor.forward_s * forward,
                backward_s=tensor.backward_s * backward,
                dtype=dtype or tensor.dtype,
            )
            for tensor in trace.tensors
        ),
    )


def count(lines: Iterable[Line]) -> tuple[int, int]:
    """How many inequalities hold, of how many."""
    verdicts = [line.verdict for line in lines if line.verdict]
    return verdicts.count("holds"), len(verdicts)
