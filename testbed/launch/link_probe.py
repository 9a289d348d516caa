"""Measures the link as a run will use it, before training, on a backend opened for this alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from testbed.backends.protocol import Group
from testbed.base.axes import COMPRESSORS
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
from testbed.profiling.link import measure_link
from testbed.profiling.sweep import first_look, quick

PROBE = "probe"  # name of the group in which the link is measured
PROBE_AGAIN = "probe-again"  # of the second one, if the plan asks for another order or credit
PLAN_S = 600.0
PAYLOAD_SHARE = 16  # compressed payloads are measured as if they were so many times shorter
NUM_TRIES = 2  # rehearsals, until their steps agree

T = TypeVar("T")

Steps = list[list[tuple[int, float]]]
"""Of each step bytes and seconds of its messages."""


class LinkProbe:
    """A backend opened as the run will use it, to measure what its messages cost; collective.

    It has the order, the credit and the channels of a plan for a guessed link. Used as a context:

        with LinkProbe(...) as probe:
            link = probe.measure()              # the plan is made from it
            link = probe.refine(plan, link)     # with --rehearse its messages are rehearsed
        link = probe.with_steal_time(link)      # known once all ranks have closed it

    Args:
        config: of the run.
        role: of this rank.
        group: of the run.
        trace: of the workload.
        dilation: factor by which the emulated cluster's times are stretched here.
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
        group.control.state = "measuring the link"
        self._cores = read_cores()
        self._stolen: list[float] = []
        self._config, self._trace, self._dilation = config, trace, dilation
        self._role, self._rehearsal, self._of_run = role, rehearsal, group
        guess = Link(
            backend=config.backend, num_workers=group.size, latency_s=1e-4, seconds_per_byte=1e-9
        )
        self._guessed = plan_for(config, trace, guess)
        self._open(role, replace(group_for(self._guessed, group), name=PROBE))

    def __enter__(self) -> LinkProbe:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close the backend with all ranks; after an error the process ends without it."""
        if kind is None:
            self._close()

    @property
    def role(self) -> Role:
        """This rank's, with the options that the backend settled on when it was opened."""
        settled = self._backend.capabilities.settled
        if settled is None:
            return self._role
        return replace(self._role, backend=self._role.backend.with_options(settled))

    def measure(self) -> Link:
        """The link for messages up to all gradients in one, measured beside the workload's load."""
        stream = stream_of(self._guessed, 1 if self._is_plain else PAYLOAD_SHARE)
        step_s = self._step_s()
        return self._beside_load(partial(self._measured, stream, step_s), step_s)

    def refine(self, plan: Plan, link: Link) -> Link:
        """The link with what rehearsed steps of the plan took, where `--rehearse` asks for it.

        Of plans by priority or in halves, the mean time of a message beyond the link's forecast is
        kept as `missing_s`; of other plans, measured over forecast time of each step as `in_steps`.
        Other plans on several channels are not rehearsed: `concurrency_slowdown` covers them. A
        plan in another order or with another credit than the guess is rehearsed on a backend opened
        as it asks; not with dedicated servers, which expect a single probe. No plan is made from
        the result.

        Args:
            plan: shared by all ranks.
            link: as `measure` gave it.
        """
        asked = group_for(plan, self._of_run)
        reopens = replace(asked, name=PROBE) != self._group
        by_message = is_rehearsed(plan)
        possible = self._config.rehearse and self._rehearses(plan)
        if (
            not possible
            or (reopens and asked.num_servers)
            or (plan.num_channels > 1 and not by_message)
        ):
            return link
        if reopens:
            role = self.role
            self._close()
            self._open(role, replace(asked, name=PROBE_AGAIN))
        if by_message:
            found = {"missing_s": missing_s(link, self._costs(plan, NUM_COUNTED))}
        else:
            found = {"in_steps": self._in_steps(plan, link)}
        seen = {key: values for key, values in found.items() if values}
        return msgspec.structs.replace(link, extra={**link.extra, **seen})

    def with_steal_time(self, link: Link) -> Link:
        """The link with the largest share of steal time of any rank while it was measured."""
        stolen = max(self._stolen, default=None)
        return msgspec.structs.replace(link, extra={**link.extra, LINK_STOLEN: stolen})

    def _open(self, role: Role, group: Group) -> None:
        self._group = group
        self._backend = open_backend(role, group)

    def _close(self) -> None:
        """Close the backend once all ranks are done with it; learn the steal time of each."""
        group = self._group
        mine = msgspec.json.encode(shares_of(self._cores, read_cores())[1])
        lost = group.control.all_gather(f"{group.name} done", mine, PLAN_S, members=group.size)
        self._stolen = [share for each in lost if (share := msgspec.json.decode(each)) is not None]
        self._backend.close(group.deadline_s)

    def _in_steps(self, plan: Plan, link: Link) -> list[float]:
        """Rehearsed again if steps disagree (the host was disturbed), not if few steps fit."""
        for _ in range(NUM_TRIES):
            found = ratios(link, self._costs(plan, FEW_COUNTED))
            if len(found) < LEAST_AGREEING or agreed(found) is not None:
                break
        return found

    def _rehearses(self, plan: Plan) -> bool:
        possible = can_rehearse(plan, self._backend, self._config.compressor)
        return possible and self._rehearsal is not None

    @property
    def _is_plain(self) -> bool:
        return COMPRESSORS.is_default(self._config)

    def _step_s(self) -> float:
        """About the seconds of a step here: the longer of its compute and of its messages."""
        look_s = self._first_look_s() * self._trace.num_bytes
        computing_s = self._dilation * (self._trace.forward_s + self._trace.backward_s)
        return max(computing_s, look_s if self._is_plain else look_s / PAYLOAD_SHARE)

    def _first_look_s(self) -> float:
        sums = Op.ALL_REDUCE in self._backend.capabilities.ops
        if self._group.size == 1 or not sums or not self._backend.capabilities.exchanges:
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
        self._group.control.state = "measuring the link"
        return steps

    def _measured(self, stream: Sequence[int], step_s: float) -> Link:
        link = measure_link(
            self._backend,
            self._group.control,
            num_workers=self._group.size,
            deadline_s=self._group.deadline_s,
            name=self._config.backend,
            sweep=quick(self._trace.num_bytes, self._dilation, stream, step_s),
            device=self._group.device,
        )
        # Beside a load nobody can tell whose processor time it was.
        return link if self._rehearsal is None else msgspec.structs.replace(link, thread_s=0.0)
