"""Changes that the simulator says would gain something; nothing is told that it has not checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

import msgspec

from testbed.base.axes import BACKENDS, COMPRESSORS, SCHEDULERS
from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.causes.explain import Explanation
from testbed.causes.summary import Advice
from testbed.prediction.cross_iteration import predict
from testbed.prediction.extrapolate import at_bandwidth, each_piece
from testbed.records.step_trace import computed_in, trace_of
from testbed.records.timeline import Timeline
from testbed.scheduling.protocol import make_plan

LEAST_S = 1e-4  # smaller gains are nothing
LEAST_SHARE = 0.02  # of the exposed time, likewise
MOST_SCHEDULERS = 3  # that are told


def schedulers(backend: str) -> tuple[str, ...]:
    """Those that may be advised: for dense messages; with two channels where they can use them."""
    found = BACKENDS.find(backend)
    several = found is not None and found.facts.max_channels > 1
    names = SCHEDULERS.which(lambda facts: not (facts.sparse or facts.chooses))
    specs: dict[str, None] = dict.fromkeys(names)
    for name in names:
        options = SCHEDULERS.resolve(name).part.options
        if several and any(f.name == "channels" and f.default == 1 for f in fields(options)):
            specs[f"{name}:channels=2"] = None
    return tuple(specs)


def advise(
    timeline: Timeline,
    found: Explanation,
    specs: Sequence[str],
    make: Callable[[str, Trace, Link], Plan] = make_plan,
    *,
    whole: bool = False,
) -> list[Advice]:
    """Changes with their simulated gains, the largest first; the link is told in any case.

    The step is simulated as it was, from its gradients' times and its plan on the link as the
    steps' exchanges show it, and with one change. A gain is the difference of the two.

    Args:
        timeline: that was explained.
        found: what was found.
        specs: schedulers that could be used instead.
        make: what the run would plan with one of them.
        whole: every step of the run waits for the whole mean gradient, whatever plans allow.
    """
    plan, link = timeline.plan, link_of(timeline, found)
    if plan is None or link is None:
        return []
    late = found.lateness.late
    steps = [played.step for played in found.rounds]
    least_s = max(LEAST_S, LEAST_SHARE * found.exposed_s)
    most_s = max(sum(of.values()) for of in found.by_rank_s)
    most_s += sum(found.lateness.late_s[rank] for rank in late)
    step_s = partial(_step_s, whole=whole)

    def against(now_s: float, other: Plan, on: Link, of: Trace) -> float:
        """The gain; no change gains more than ranks stood still, and a late one its own time."""
        gained = min(now_s - step_s(other, on, of), most_s)
        return gained if gained >= least_s else 0.0

    try:
        trace = trace_of(plan, computed_in(timeline, steps, range(timeline.num_workers)))
        if timeline.compressor not in ("", COMPRESSORS.default):
            return _without_compressor(timeline, found, plan, trace, against)
        now_s = step_s(plan, link, trace)
    except UsageError:
        return []  # it runs and cannot be simulated: priorities or halves on several channels

    def gain_s(other: Plan, on: Link = link, of: Trace = trace) -> float:
        return against(now_s, other, on, of)

    told = []
    for spec in specs:
        try:
            gained = gain_s(make(spec, trace, link))
        except UsageError:
            continue  # not for this model, or not to be simulated
        told.append(Advice(change=f"scheduler={spec}", gain_s=gained, options={"scheduler": spec}))
    best = sorted((a for a in told if a.gain_s > 0), key=lambda a: -a.gain_s)[:MOST_SCHEDULERS]
    if not best and told:
        best = [Advice(change="another scheduler", gain_s=0.0)]
    others = [
        Advice(change="a link of twice the rate", gain_s=gain_s(plan, at_bandwidth(link, 2.0))),
        Advice(
            change="half the start-up time",
            gain_s=gain_s(plan, each_piece(link, lambda a, b: (a / 2, b))),
        ),
    ]
    if late:
        rest = [r for r in range(timeline.num_workers) if r not in late]
        names = ", ".join(map(str, sorted(late)))
        gained = gain_s(plan, of=trace_of(plan, computed_in(timeline, steps, rest)))
        others.append(Advice(change=f"rank {names} as fast as the others", gain_s=gained))
    return sorted([*best, *others], key=lambda a: -a.gain_s)


def _step_s(plan: Plan, link: Link, trace: Trace, *, whole: bool) -> float:
    """The simulated step; as a whole, no message travels in the next forward pass."""
    if whole:
        plan = msgspec.structs.replace(plan, crosses_iteration=False)
    return predict(plan, trace, link).iteration_s


def _without_compressor(
    timeline: Timeline,
    found: Explanation,
    plan: Plan,
    trace: Trace,
    against: Callable[[float, Plan, Link, Trace], float],
) -> list[Advice]:
    """What the same plan of dense messages would gain, on a link that was measured with such."""
    if timeline.link is None:
        return []
    now_s = found.exposed_s + trace.forward_s + trace.backward_s
    gained = against(now_s, plan, timeline.link, trace)
    options = {"compressor": COMPRESSORS.default}
    return [Advice(change="no compressor", gain_s=gained, options=options)]


def link_of(timeline: Timeline, found: Explanation) -> Link | None:
    """The link as these steps' exchanges show it; None where they cannot tell it.

    What the line through them misses in the mean is a start-up's, so that a step's messages take
    together what they took.
    """
    costs = found.costs
    more_s = costs.more_startup_s + costs.missed_s
    if costs.untold_s:
        return None
    if timeline.link is None:
        return Link(
            backend=timeline.backend,
            num_workers=timeline.num_workers,
            latency_s=max(0.0, more_s),
            seconds_per_byte=max(0.0, costs.more_s_per_byte),
        )
    return each_piece(
        timeline.link,
        lambda a, b: (max(0.0, a + more_s), max(0.0, b + costs.more_s_per_byte)),
    )
