"""Plans for a framework that has a schedule of its own and takes plans; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from testbed.base.axes import BACKENDS, OwnSchedule, Taken
from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.cross_iteration import predict
from testbed.prediction.timeline import check_belongs
from testbed.scheduling.auto import candidate_specs
from testbed.scheduling.build import TooManyMessages
from testbed.scheduling.protocol import make_plan


@dataclass(frozen=True)
class Fitted:
    """A plan as the framework carries it out.

    Attributes:
        scheduler: that made it.
        taken: what the framework makes of it; None: nothing, see `why`.
        iteration_s: predicted, of what the framework carries out.
        why: it cannot be carried out.
    """

    scheduler: str
    taken: Taken | None = None
    iteration_s: float | None = None
    why: str = ""


def framework_of(backend: str) -> OwnSchedule:
    """The schedule of a framework that takes plans.

    Raises:
        UsageError: the backend has no schedule of its own, or takes no plan for it.

    Example:
        >>> framework_of("ddp").like
        'bucket:mib=25,first_mib=1'
    """
    own = BACKENDS.resolve(backend).facts.schedule
    if own is None or own.takes is None:
        known = BACKENDS.which(lambda f: f.schedule is not None and f.schedule.takes is not None)
        raise UsageError(
            f"backend {backend!r} is no framework that takes plans; expected one of "
            f"{', '.join(known)}; other backends carry out any plan: testbed run --plan FILE"
        )
    return own


def plans_for(
    own: OwnSchedule, trace: Trace, link: Link, specs: Sequence[str] | None = None
) -> list[Fitted]:
    """Each scheduler's plan as the framework carries it out, with its predicted time.

    Args:
        own: of the framework.
        trace: of one worker.
        link: that the framework's exchanges go over.
        specs: schedulers; None = the framework's own schedule first, then those that `auto` tries
            within the backward pass.

    Returns:
        In the order of the schedulers, a plan that is carried out like an earlier one left out.
    """
    if specs is None:
        specs = tuple(dict.fromkeys((own.like, *candidate_specs(trace, cross_iteration=False))))
    found: dict[str, Fitted] = {}
    for spec in specs:
        try:
            fitted = fit(own, make_plan(spec, trace, link), trace, link)
        except TooManyMessages as error:
            fitted = Fitted(spec, why=str(error))
        carried = fitted.taken and msgspec.structs.replace(fitted.taken.plan, scheduler="")
        found.setdefault(carried.digest() if carried else spec, fitted)
    return list(found.values())


def fit(
    own: OwnSchedule, plan: Plan, trace: Trace | None = None, link: Link | None = None
) -> Fitted:
    """One plan as the framework carries it out; predicted where trace and link are given."""
    assert own.takes is not None
    if trace is not None:
        check_belongs(plan, trace)
    try:
        taken = own.takes(plan)
    except UsageError as error:
        return Fitted(plan.scheduler, why=str(error))
    if trace is None or link is None:
        return Fitted(plan.scheduler, taken)
    return Fitted(plan.scheduler, taken, predict(taken.plan, trace, link).iteration_s)


def fastest(found: Sequence[Fitted]) -> Fitted:
    """The plan with the smallest predicted iteration time; of equal ones the first.

    Raises:
        UsageError: the framework can carry out none of them; says why.
    """
    possible = [each for each in found if each.taken is not None]
    if not possible:
        raise UsageError("; ".join(f"{each.scheduler}: {each.why}" for each in found))
    return min(possible, key=lambda each: each.iteration_s or 0.0)
