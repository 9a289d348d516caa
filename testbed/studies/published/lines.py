"""One published number beside the simulated one, and how settings of papers are simulated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from testbed.base.link import Link
from testbed.base.trace import Trace
from testbed.prediction.cross_iteration import predict
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
        >>> from testbed.base.files import load_shipped_trace
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


# Start-up times and times per byte that papers' authors fitted to their clusters.
#
# Shi, Chu and Li, 2021, IEEE TPDS 32(8) and 2021, INFOCOM; Zhang et al., 2023, ICDCS (their
# released code). Four GPUs in a node unless said otherwise; 32 and 64 GPUs were scaled by hand by
# the authors.

# Slowdown of k simultaneous messages: 1.5 was published for two; more follow from the line rate
# over what one message reaches (1.6), as in the contention measurements.
SLOWDOWN: Final = tuple(max((k + 1) / 2, k / 1.6) for k in range(1, 9))

TEN_GBIT: Final = {
    8: (5.23e-4, 8.57e-10),
    16: (9.08e-4, 7.40e-10),
    32: (4.04e-3, 8.64e-10),
    64: (7.04e-3, 9.64e-10),
}
INFINIBAND: Final = {
    8: (9.75e-5, 3.06e-10),
    16: (2.36e-4, 4.06e-10),
    32: (4.06e-4, 4.91e-10),
    64: (8.06e-4, 5.89e-10),
}
EIGHT_NODES: Final = (1.369e-3, 1.657e-9)  # 10 Gbit/s, one GPU each
K80: Final = {2: (1.0e-4, 1.7e-9), 4: (1.6e-4, 2.4e-9), 8: (1.11e-3, 1.99e-9)}  # by nodes


def link_of(constants: tuple[float, float], num_workers: int) -> Link:
    """The link with these constants and the published law of simultaneous messages."""
    return Link(
        backend="published",
        num_workers=num_workers,
        latency_s=constants[0],
        seconds_per_byte=constants[1],
        concurrency_slowdown=SLOWDOWN,
    )


def fitted() -> dict[str, Link]:
    """All fitted links across nodes by name."""
    return {
        f"{name}, {num_workers} GPUs": link_of(constants, num_workers)
        for name, table in (("10GbE", TEN_GBIT), ("56Gb IB", INFINIBAND))
        for num_workers, constants in table.items()
    }
