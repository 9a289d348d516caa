"""`auto`: the scheduler and parameters with the smallest predicted iteration time, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from testbed.base.axes import SCHEDULERS, SchedulerFacts
from testbed.base.errors import UsageError
from testbed.base.knobs import no_knobs
from testbed.base.link import Link
from testbed.base.parts import OURS, Part
from testbed.base.plan import Plan
from testbed.base.spec import former_names
from testbed.base.trace import Trace
from testbed.base.units import format_seconds
from testbed.prediction.cross_iteration import predict
from testbed.prediction.timeline import Timeline
from testbed.scheduling.build import TooManyMessages
from testbed.scheduling.protocol import make_plan

DEFAULT_NOISE: Final = 0.03
NOISE_KEY: Final = "relative_residual_median"
MANY_TENSORS: Final = 1000


@dataclass(frozen=True)
class AutoOptions:
    """Options of `auto`.

    Attributes:
        noise: relative difference that measurements cannot resolve; None = the link's key
            `relative_residual_median` (of its fit), or 0.03 without one.
        cross_iteration: whether plans may be chosen whose messages travel during the next forward
            pass.
    """

    noise: float | None = None
    cross_iteration: bool = field(default=True, metadata=former_names("crossing"))

    def __post_init__(self) -> None:
        if self.noise is not None and not 0 <= self.noise < 1:
            raise UsageError(f"auto: noise is {self.noise}; expected 0 <= noise < 1, as in 0.03")


@dataclass(frozen=True)
class Candidate:
    """A scheduler, its plan and the predicted timeline of the plan."""

    scheduler: str
    plan: Plan
    predicted: Timeline


def plan_auto(trace: Trace, link: Link, options: AutoOptions) -> Plan:
    """The candidate with the smallest predicted iteration time; of equal ones the simplest.

        argmin over candidates s of predict(plan_s(trace, link), trace, link).iteration_s

    The plan's reason names the runners-up, the lower bound, and whether the differences are large
    enough to be measured.

    Args:
        trace: sizes (bytes), times (s) and forward order (`consumers`).
        link: gives T(M), the slow-down of simultaneous messages, and the noise of its fit.
        options: noise, and whether plans may cross the iteration.

    Raises:
        UsageError: a bad option, or a bad DAG in the trace.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2, 3, 3, 5], [3, 4, 1, 1, 1], [1, 1, 1, 2, 2])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> print(make_plan("auto", trace, link).reason.partition(";")[0])
        auto chose asc-wfbp of 21 candidates: 28 s

    Reference:
        None published. Departs: ByteScheduler and DeAR tune parameters by timing steps (Peng et
        al., 2019, SOSP; Zhang et al., 2023, ICDCS); here all candidates are predicted and none is
        run.
    """
    candidates = _simulated(candidate_specs(trace, options.cross_iteration), trace, link)
    best = min(candidates, key=lambda c: c.predicted.iteration_s)
    noise = noise_of(link, options)
    return msgspec.structs.replace(best.plan, reason=explain(best, candidates, noise))


def candidate_specs(trace: Trace, cross_iteration: bool) -> tuple[str, ...]:
    """What `auto` predicts: of each scheduler what it declares, in the order of the table.

    Candidates that would cut a model into more than a million messages are left out later.
    """
    found: list[str] = []
    for name in SCHEDULERS.which(lambda facts: cross_iteration or not facts.crosses_iteration):
        facts = SCHEDULERS.resolve(name).facts
        tried = facts.tried
        if len(trace.tensors) > MANY_TENSORS and facts.tried_of_many is not None:
            tried = facts.tried_of_many
        found += [f"{name}:{options}" if options else name for options in tried]
    return tuple(found)


def noise_of(link: Link, options: AutoOptions) -> float:
    """The relative difference below which two predictions count as equal."""
    if options.noise is not None:
        return options.noise
    fit = link.extra.get("fit")
    measured = fit.get(NOISE_KEY) if isinstance(fit, dict) else link.extra.get(NOISE_KEY)
    if isinstance(measured, bool) or not isinstance(measured, int | float):
        return DEFAULT_NOISE
    return float(measured)


def explain(best: Candidate, candidates: list[Candidate], noise: float) -> str:
    """The reason in words: how far from the lower bound, and from the best of other schedulers."""
    others = _best_of_other_families(best, candidates)
    time_s = best.predicted.iteration_s
    bound_s = best.predicted.lower_bound_s
    words = [
        f"auto chose {best.scheduler} of {len(candidates)} candidates: {format_seconds(time_s)}"
    ]
    if bound_s > 0:
        words.append(
            f"{time_s / bound_s - 1:.1%} above the lower bound of {format_seconds(bound_s)}"
        )
    beside = ", ".join(
        f"{c.scheduler} {format_seconds(c.predicted.iteration_s)} (+{_above(c, time_s):.1%})"
        for c in others[:3]
    )
    words.append(f"next: {beside}")
    alike = [c.scheduler for c in others if _above(c, time_s) < noise]
    if alike:
        words.append(
            f"the predicted difference to {', '.join(alike)} is smaller than the noise of "
            f"{noise:.1%}: a measurement may not tell them apart"
        )
    else:
        words.append(f"the difference is larger than the noise of {noise:.1%}")
    return "; ".join([*words, best.plan.reason] if best.plan.reason else words)


def _best_of_other_families(best: Candidate, candidates: list[Candidate]) -> list[Candidate]:
    """The fastest parameters of each other scheduler, fastest first."""
    families: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.predicted.iteration_s):
        families.setdefault(_family(candidate), candidate)
    return [c for name, c in families.items() if name != _family(best)]


def _family(candidate: Candidate) -> str:
    return candidate.scheduler.partition(":")[0]


def _above(candidate: Candidate, time_s: float) -> float:
    return candidate.predicted.iteration_s / time_s - 1 if time_s > 0 else 0.0


def _simulated(schedulers: Sequence[str], trace: Trace, link: Link) -> list[Candidate]:
    candidates: list[Candidate] = []
    for scheduler in schedulers:
        try:
            plan = make_plan(scheduler, trace, link)
        except TooManyMessages:  # no candidate for so large a model; asked for by name it says so
            continue
        candidates.append(Candidate(scheduler, plan, predict(plan, trace, link)))
    return candidates


AUTO = Part(
    name="auto",
    summary="the scheduler predicted to be fastest, and why (noise, cross_iteration)",
    origin=OURS,
    build=plan_auto,
    options=AutoOptions,
    facts=lambda options: SchedulerFacts(
        chooses=True,
        crosses_iteration=options.cross_iteration,
        within_iteration=replace(options, cross_iteration=False),
    ),
    knobs=no_knobs,  # it searches by itself; noise tells what a machine can resolve
)
