"""The link as a run will use it, measured before training on a backend opened for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from testbed.backends.protocol import Group
from testbed.base.config import RunConfig
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.base.types import Op
from testbed.launch.join import Role, open_backend
from testbed.launch.plan_options import group_for, plan_for, stream_of
from testbed.noise.rehearsal import (
    FEW_COUNTED,
    NUM_COUNTED,
    Rehearsal,
    beside,
    can_rehearse,
    is_rehearsed,
)
from testbed.noise.steal_time import LINK_STOLEN, read_cores, shares_of
from testbed.prediction.rehearsal_fit import LEAST_AGREEING, agreed, missing_s, ratios
from testbed.profiling.link import link_of_steps, measure_link
from testbed.profiling.sweep import first_look, quick
from testbed.scheduling.protocol import needs_profile

PROBE = "probe"  # what the backend is called that only measures the link
PROBE_AGAIN = "probe-again"
PLAN_S = 600.0
PAYLOAD_SHARE = 16
NUM_TRIES = 2  # to find steps that agree

T = TypeVar("T")

Steps = list[list[tuple[int, float]]]
"""Of each step bytes and seconds of its messages."""


def from_rank_0(group: Group, name: str, mine: bytes) -> bytes:
    """Rank 0's value on all ranks: ranks measure different times and must not plan differently."""
    given = mine if group.rank == 0 else b""
    return group.control.all_gather(name, given, PLAN_S, members=group.size)[0]


class Probe:
    """A backend opened as the run will use it, to see what its messages cost; collective.

    It has the order, the credit and the channels that the scheduler asks for, as far as a plan for
    a link that is only guessed tells them. Messages by priority, in halves, and those of a plan
    that the link decides are timed in a few rehearsed steps of a replayed workload, all others in
    a row.

    Args:
        config: of the run.
        role: of this rank.
        group: the run's.
        trace: of the workload.
        dilation: how many times slower than on the emulated cluster everything is here.
        rehearsal: None = the workload cannot be rehearsed.
    """

    def __init__(
        self,
        config: RunConfig,
        role: Role,
        group: Group,
        trace: Trace,
        dilation: float,
        rehearsal: Rehearsal | None,
    ) -> None:
        group.control.set_state("measuring the link")
        self._cores = read_cores()
        self._lost: list[float] = []
        self._config, self._trace, self._dilation = config, trace, dilation
        self._role, self._rehearsal, self._of_run = role, rehearsal, group
        guess = Link(
            backend=config.backend, num_workers=group.size, latency_s=1e-4, seconds_per_byte=1e-9
        )
        self._guessed = plan_for(config, trace, guess)
        self._group = replace(group_for(self._guessed, group), name=PROBE)
        self._backend = open_backend(role, self._group)

    @property
    def role(self) -> Role:
        """This rank's, with the options that the backend settled on when it was opened."""
        settled = self._backend.capabilities.settled
        return self._role if settled is None else replace(self._role, options=settled)

    def link(self) -> Link:
        """The link for messages up to all gradients in one, measured beside what the workload does.

        Where a plan is rehearsed it is fitted to the messages of the guessed plan's steps: to them
        alone, which training follows at once, if that is the plan; also to them, of few steps, if
        the link will decide the plan, which is rehearsed then (see `link_of`). What the fit
        leaves out of them is kept in the link's `missing_s`; a plan is made without it, so that
        `auto` compares all alike.
        """
        stream: list[int] = []
        steps: Steps = []
        if is_rehearsed(self._guessed) and self._rehearses(self._guessed):
            steps = self._costs(self._guessed, FEW_COUNTED if self._decides else NUM_COUNTED)
            known = self._known(steps)
            if known is not None:
                return known
        else:
            stream = stream_of(self._guessed, 1 if self._is_plain else PAYLOAD_SHARE)
        step_s = self._step_s()
        return self._beside_load(partial(self._measured, stream, steps, step_s), step_s)

    def _known(self, steps: Steps) -> Link | None:
        """The link of a rehearsed plan that is the run's; None where something is left to measure.

        What lies between a rehearsal and the training that it tells of is time in which a machine
        may grow slower or faster.
        """
        if self._decides or self._guessed.num_channels > 1:
            return None
        return link_of_steps(self._config.backend, self._of_run.size, steps)

    def link_of(self, plan: Plan, link: Link) -> Link:
        """The link with what the messages of the plan that it led to take; closes the probe.

        They are rehearsed wherever that is possible: what a link leaves out of the steps of a plan
        by priority or in halves is kept as `missing_s`, by what factor it misses those of any other
        plan as `in_steps`; not if several messages are under way at once, which the link's
        slow-down tells. A plan in another order or with another credit than the guess is tried on a
        backend that is opened as it asks; not with dedicated servers, which expect a single probe.

        Args:
            plan: shared by all ranks.
            link: as `link` gave it.
        """
        if not self._decides:
            self._close()
            return self._told(link, link.extra)
        asked, role = group_for(plan, self._of_run), self.role
        again = replace(asked, name=PROBE) != self._group
        at_once = plan.num_channels > 1 and not is_rehearsed(plan)
        possible = self._rehearses(plan) and not at_once and not (again and asked.num_servers)
        if possible and again:
            self._close()
            self._group = replace(asked, name=PROBE_AGAIN)
            self._backend = open_backend(role, self._group)
        extra = {key: value for key, value in link.extra.items() if key != "missing_s"}
        if possible and is_rehearsed(plan):
            extra["missing_s"] = missing_s(link, self._costs(plan, NUM_COUNTED))
        elif possible:
            extra["in_steps"] = self._in_steps(plan, link)
        self._close()
        return self._told(link, {key: value for key, value in extra.items() if value != []})

    def _told(self, link: Link, extra: Mapping[str, Any]) -> Link:
        """The link with what the host took meanwhile, from the rank that lost most."""
        stolen = max(self._lost, default=None)
        return msgspec.structs.replace(link, extra={**extra, LINK_STOLEN: stolen})

    def _in_steps(self, plan: Plan, link: Link) -> list[float]:
        """Rehearsed again where steps disagree (the host had a slow moment), not where few fit."""
        for _ in range(NUM_TRIES):
            found = ratios(link, self._costs(plan, FEW_COUNTED))
            if len(found) < LEAST_AGREEING or agreed(found) is not None:
                break
        return found

    def _close(self) -> None:
        """Close the backend, once all ranks are done with it; hear what their cores lost."""
        group = self._group
        mine = msgspec.json.encode(shares_of(self._cores, read_cores())[1])
        lost = group.control.all_gather(f"{group.name} done", mine, PLAN_S, members=group.size)
        self._lost = [share for each in lost if (share := msgspec.json.decode(each)) is not None]
        self._backend.close(group.deadline_s)

    def _rehearses(self, plan: Plan) -> bool:
        possible = can_rehearse(plan, self._backend, self._config.compressor)
        return possible and self._rehearsal is not None

    @property
    def _decides(self) -> bool:
        """Whether the link decides the plan, so that the guess is not what will be run."""
        return needs_profile(self._config.scheduler)

    @property
    def _is_plain(self) -> bool:
        return self._config.compressor == RunConfig().compressor

    def _step_s(self) -> float:
        """Seconds of a step here, about: the longer of what it computes and of its messages."""
        look_s = self._first_look_s() * self._trace.num_bytes
        computing_s = self._dilation * (self._trace.forward_s + self._trace.backward_s)
        return max(computing_s, look_s if self._is_plain else look_s / PAYLOAD_SHARE)

    def _first_look_s(self) -> float:
        sums = Op.ALL_REDUCE in self._backend.capabilities.ops
        if self._group.size == 1 or not sums or self._backend.capabilities.consistency == "none":
            return 0.0
        return first_look(
            self._backend,
            self._group.control,
            deadline_s=self._group.deadline_s,
            device=self._group.device,
        )

    def _beside_load(self, measure: Callable[[], T], step_s: float) -> T:
        if self._rehearsal is None:
            return measure()
        return beside(self._rehearsal.load, measure, every_s=step_s)

    def _costs(self, plan: Plan, num_steps: int) -> Steps:
        assert self._rehearsal is not None  # asked before
        steps = self._rehearsal.costs(plan, self._backend, self._group, num_steps)
        self._group.control.set_state("measuring the link")
        return steps

    def _measured(self, stream: Sequence[int], steps: Steps, step_s: float) -> Link:
        return measure_link(
            self._backend,
            self._group.control,
            num_workers=self._group.size,
            deadline_s=self._group.deadline_s,
            name=self._config.backend,
            sweep=quick(self._trace.num_bytes, self._dilation, stream, step_s),
            steps=steps,
            device=self._group.device,
        )
