"""From a timeline's events to the trace of a step, for all that is simulated of a recorded run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median

import msgspec

from testbed.base.errors import UsageError
from testbed.base.plan import Plan
from testbed.base.trace import Trace, TraceTensor
from testbed.records.timeline import Timeline, TimelineEvent


class Computed(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks computed in one step; times without waits.

    Attributes:
        turn_s: when the first of them began the backward pass that made the gradients.
        ready_s: tensor -> when the last of them had its gradient, from then on.
        own_s: of the slowest: from the step's begin to its last gradient, and updates after it.
    """

    turn_s: float
    ready_s: dict[str, float]
    own_s: float


def computed_in(
    timeline: Timeline, steps: Collection[int], ranks: Collection[int]
) -> list[Computed]:
    """What these ranks computed in each of these steps.

    Raises:
        UsageError: the timeline does not tell when gradients were ready.
    """
    found: dict[tuple[int, int], list[TimelineEvent]] = {(s, r): [] for s in steps for r in ranks}
    for event in timeline.events:
        if (event.step, event.rank) in found:
            found[event.step, event.rank].append(event)
    made = []
    for step in steps:
        each = [_computed(found[step, rank]) for rank in ranks]
        turn_s = min(one.turn_s for one in each)
        ready: dict[str, float] = {}
        for one in each:
            for name, at_s in one.ready_s.items():
                ready[name] = max(ready.get(name, 0.0), one.turn_s - turn_s + at_s)
        own_s = max(one.own_s for one in each)
        made.append(Computed(turn_s=turn_s, ready_s=ready, own_s=own_s))
    return made


def _computed(events: Sequence[TimelineEvent]) -> Computed:
    """Of one rank; its backward pass began with the first gradient's layer, after all waits."""
    ready = {e.name: e.begin_s for e in events if e.kind == "ready"}
    if not ready:
        raise UsageError(
            "the timeline does not tell when gradients were ready; expected `ready` events of each "
            "rank in each step; run again with --timeline"
        )
    first_s, last_s = min(ready.values()), max(ready.values())
    waits = [e for e in events if e.kind == "wait"]
    begins = [e.begin_s for e in events if e.kind == "compute" and e.name.endswith("backward")]
    before = (at_s for at_s in (*begins, *(w.end_s for w in waits)) if at_s < first_s)
    turn_s = max(before, default=first_s)

    def computed_s(begin_s: float, end_s: float) -> float:
        waited = (min(w.end_s, end_s) - max(w.begin_s, begin_s) for w in waits)
        return end_s - begin_s - sum(s for s in waited if s > 0)

    return Computed(
        turn_s=turn_s,
        ready_s={name: computed_s(turn_s, at_s) for name, at_s in ready.items()},
        own_s=computed_s(min(e.begin_s for e in events), last_s)
        + sum(e.duration_s for e in events if e.kind == "update" and e.begin_s >= last_s),
    )


def trace_of(plan: Plan, computed: Sequence[Computed]) -> Trace:
    """The trace of a step: medians over these.

    A gradient that was ready before one of a later layer, or is not told, counts as ready with it.
    All that is computed beside the backward pass is divided among tensors as that pass is.
    """
    moments: dict[str, list[float]] = {}
    for each in computed:
        for name, at_s in each.ready_s.items():
            moments.setdefault(name, []).append(at_s)
    rows = zip(plan.names, plan.num_elements, plan.dtypes, strict=True)
    plain = tuple(
        TraceTensor(name=n, num_elements=e, dtype=d, forward_s=0.0, backward_s=0.0)
        for n, e, d in rows
    )
    trace = Trace(name="recorded", device="", batch_size=1, tensors=plain)
    trace = trace.delayed({name: median(found) for name, found in moments.items()})
    backward_s = trace.backward_s
    forward_s = max(0.0, median(each.own_s for each in computed) - backward_s)
    tensors = (
        msgspec.structs.replace(
            t, forward_s=forward_s * (t.backward_s / backward_s if backward_s else 1 / len(plain))
        )
        for t in trace.tensors
    )
    return msgspec.structs.replace(trace, tensors=tuple(tensors))
