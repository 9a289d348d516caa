"""One published number beside the simulated one, and how settings of papers are simulated."""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from statistics import median
from typing import Final, Literal

import msgspec

from testbed.base.link import Link
from testbed.base.trace import Trace
from testbed.prediction.cross_iteration import predict
from testbed.scheduling.protocol import make_plan

PUBLISHED_SCHEMA: Final = "testbed.published/1"
TIE: Final = 1e-6
WITHIN: Final = log(1.2)  # a factor of 1.2 either way: "within 20 %"

Verdict = Literal["holds", "does not hold", ""]
LeftOut = Literal["", "one-sided", "constant", "variant"]


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
        least: lower end of what was published; 0 where it says "up to".
        most: upper end; with `least` the published number where that is exact.
        error: |ln(simulated / published)|; outside of `least` .. `most`, the distance to its end.
        with_o: simulated, where each message also takes the computing thread `OVERHEAD_S`.
        with_o_error: of that.
        left_out: why the line is in no count of inequalities. `one-sided`: under the model the
            first method takes no longer than the second whatever the constants (`NEVER_SLOWER`), so
            that a gain cannot come out as a loss, nor a loss at all: only its size tells anything;
            `constant`: ours prints a published constant; `variant`: another assumption about a
            number that is counted already.
        beats_wire: its link's time per byte is below what the line rate allows (`beats_wire`).
        knew_o: `OVERHEAD_S` was chosen in sight of this number, so that `with_o` predicts nothing.
    """

    paper: str
    setting: str
    quantity: str
    published: float
    simulated: float
    ratio: float
    verdict: Verdict = ""
    reason: str = ""
    least: float = 0.0
    most: float = 0.0
    error: float = 0.0
    with_o: float | None = None
    with_o_error: float | None = None
    left_out: LeftOut = ""
    beats_wire: bool = False
    knew_o: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether a number was published, and no bound or range."""
        return self.least == self.most


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
        least=published,
        most=published,
        error=distance(simulated, published, published),
    )


def gain(
    paper: str,
    setting: str,
    quantity: str,
    published: float,
    simulated: float,
    reason: str,
    at_least: float = 1.0,
    *,
    between: tuple[float, float] | None = None,
    left_out: LeftOut = "",
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
        between: ends of what was published, (0, x) for "up to x"; None = the number itself.
        left_out: see `Line`.

    Example:
        >>> gain("p", "s", "a over b", 1.2, 1.0, "tie").verdict
        'does not hold'
        >>> gain("p", "s", "a over b", 1.2, 1.1, "", between=(0, 1.2)).error
        0.0
        >>> gain("p", "s", "a over b", 0.99, 1.0, "").verdict
        'holds'
    """
    ours, theirs = simulated - at_least > TIE, published - at_least > TIE
    if at_least != 1:
        ours, theirs = simulated >= at_least, True
    holds = ours == theirs
    least, most = between or (published, published)
    return Line(
        paper=paper,
        setting=setting,
        quantity=quantity,
        published=published,
        simulated=simulated,
        ratio=simulated / published,
        verdict="holds" if holds else "does not hold",
        reason="" if holds else reason,
        least=least,
        most=most,
        error=distance(simulated, least, most),
        left_out=left_out,
    )


# Under any start-up and time per byte the first takes no longer than the second: it plans for them,
# its messages share a link at a published gain, or it has the best of several sizes.
NEVER_SLOWER: Final = frozenset(
    {
        ("mg-wfbp", "wfbp"),
        ("mg-wfbp", "sequential"),
        ("asc-wfbp", "wfbp"),
        ("asc-wfbp", "mg-wfbp"),
        ("bytescheduler", "wfbp"),
    }
)


def of_rules(fast: str, slow: str) -> LeftOut:
    """Whether the model alone sets the direction of a gain between two rules.

    Example:
        >>> of_rules("mg-wfbp", "wfbp"), of_rules("wfbp", "sequential")
        ('one-sided', '')
    """
    return "one-sided" if (fast, slow) in NEVER_SLOWER else ""


def distance(simulated: float, least: float, most: float) -> float:
    """How far a number is outside of a published range, as a logarithm of their ratio.

        max(0, ln(least / simulated), ln(simulated / most))

    Example:
        >>> round(distance(1.5, 1.0, 1.0), 3), distance(1.5, 0.0, 2.0)
        (0.405, 0.0)
    """
    return max(0.0, log(least / simulated) if least else 0.0, log(simulated / most))


def beside_o(plain: Iterable[Line], with_o: Iterable[Line]) -> list[Line]:
    """The lines of a section, each with what the same section says where messages cost o too."""
    return [
        msgspec.structs.replace(
            line,
            with_o=other.simulated,
            with_o_error=distance(other.simulated, line.least, line.most),
        )
        for line, other in zip(plain, with_o, strict=True)
    ]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How far a group of lines is from what was published.

    Attributes:
        num_lines: of the group.
        holding: inequalities on the published side; null: they are no inequalities.
        median: of the errors of a + b M; null: no lines.
        within: share of the lines that are off by a factor of at most 1.2.
        with_o_median: likewise for a, b and o.
        with_o_within: likewise.
    """

    num_lines: int
    holding: int | None = None
    median: float | None = None
    within: float | None = None
    with_o_median: float | None = None
    with_o_within: float | None = None


def score(lines: Iterable[Line]) -> Score:
    """The score of a group.

    Example:
        >>> score([gain("p", "s", "a over b", 1.2, 1.2, "")]).within
        1.0
    """
    chosen = list(lines)
    if not chosen:
        return Score(num_lines=0)
    errors = [line.error for line in chosen]
    others = [line.with_o_error for line in chosen if line.with_o_error is not None]
    return Score(
        num_lines=len(chosen),
        holding=count(chosen)[0] if all(line.verdict for line in chosen) else None,
        median=median(errors),
        within=_within(errors),
        with_o_median=median(others) if others else None,
        with_o_within=_within(others) if others else None,
    )


def _within(errors: list[float]) -> float:
    return sum(error <= WITHIN for error in errors) / len(errors)


def iteration_s(spec: str, trace: Trace, link: Link, believed: Link | None = None) -> float:
    """Seconds of an iteration, planned for the link or for another that the planner believes in."""
    return predict(make_plan(spec, trace, believed or link), trace, link).iteration_s


# What a method may choose from where its paper leaves a size open: as many candidates for each.
SIZES_MIB: Final = (4, 8, 16, 25, 50, 100)
SEARCHED: Final = {
    "bucket": "bucket:mib={mib}",
    "cycle": "cycle:mib={mib}",
    "dear": "dear:mib={mib}",
    "bytescheduler": "bytescheduler:partition_kib={kib},credit_kib={kib}",
}


def candidates(method: str) -> tuple[str, ...]:
    """The specifications that a method's best time is taken over; one for a rule without sizes.

    Example:
        >>> candidates("mg-wfbp"), len(candidates("dear")), candidates("dear")[0]
        (('mg-wfbp',), 6, 'dear:mib=4')
    """
    form = SEARCHED.get(method, method)
    return tuple(dict.fromkeys(form.format(mib=size, kib=1024 * size) for size in SIZES_MIB))


def searched_s(method: str, trace: Trace, link: Link) -> float:
    """Seconds of an iteration under the best of a method's candidates."""
    return min(iteration_s(spec, trace, link) for spec in candidates(method))


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
