"""Measures the link as a run will use it, before training, on a backend opened for this alone."""

from __future__ import annotations

import enum
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
from testbed.profiling.link import link_of_steps, measure_link
from testbed.profiling.sweep import first_look, quick
from testbed.scheduling.protocol import needs_profile

PROBE = "probe"  # name of the group in which the link is measured
PROBE_AGAIN = "probe-again"  # of the second one, if the plan asks for another order or credit
PLAN_S = 600.0
PAYLOAD_SHARE = 16  # compressed payloads are measured as if they were so many times shorter
NUM_TRIES = 2  # rehearsals, until their steps agree

T = TypeVar("T")

Steps = list[list[tuple[int, float]]]
"""Of each step bytes and seconds of its messages."""


def from_rank_0(group: Group, name: str, mine: bytes) -> bytes:
    """Rank 0's value on all ranks: ranks measure different times and must not plan differently."""
    given = mine if group.rank == 0 else b""
    return group.control.all_gather(name, given, PLAN_S, members=group.size)[0]


class Method(enum.StrEnum):
    """How the cost of a plan's messages is measured."""

    ROWS = "rows"  # messages of several sizes, one after another
    STEPS = "steps"  # the messages of rehearsed steps, alone
    ROWS_AND_STEPS = "rows and steps"
    RATIO = "ratio"  # how far rehearsed steps are from the link fitted to rows
    NONE = "none"


def first_method(plan: Plan, *, is_final: bool, can_rehearse: bool) -> Method:
    """How the link is measured before there is a plan; the guessed plan has its order and channels.

    Messages by priority or in halves are decided one by one while gradients arrive; no row of
    messages tells their cost, so they are rehearsed.

    Args:
        plan: made for a guessed link.
        is_final: the link does not change the plan, so that the run executes this one.
        can_rehearse: steps of it can be rehearsed.

    Example:
        >>> plan = Plan(scheduler="x", names=(), num_elements=(), dtypes=(), messages=())
        >>> str(first_method(plan, is_final=True, can_rehearse=True))
        'rows'
    """
    if not (is_rehearsed(plan) and can_rehearse):
        return Method.ROWS
    # Training follows at once: what lies between is time in which the machine may change its speed.
    return Method.STEPS if is_final and plan.num_channels == 1 else Method.ROWS_AND_STEPS


def second_method(plan: Plan, *, is_final: bool, can_rehearse: bool) -> Method:
    """What is measured once the link has decided the plan: see `first_method`.

    Of several messages at once the slow-down of the link tells the cost, not a rehearsal.
    """
    at_once = plan.num_channels > 1 and not is_rehearsed(plan)
    if is_final or not can_rehearse or at_once:
        return Method.NONE
    return Method.STEPS if is_rehearsed(plan) else Method.RATIO


class LinkProbe:
    """A backend opened as the run will use it, to measure what its messages cost; collective.

    It has the order, the credit and the channels of a plan for a guessed link. Used as a context:

        with LinkProbe(...) as probe:
            link = probe.measure()              # the plan is made from it
            link = probe.refine(plan, link)     # and its messages are rehearsed
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
        self._is_final = not needs_profile(config.scheduler)
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
        guessed = self._guessed
        method = first_method(
            guessed, is_final=self._is_final, can_rehearse=self._rehearses(guessed)
        )
        steps: Steps = []
        stream: list[int] = []
        if method is Method.ROWS:
            stream = stream_of(guessed, 1 if self._is_plain else PAYLOAD_SHARE)
        else:
            steps = self._costs(guessed, NUM_COUNTED if self._is_final else FEW_COUNTED)
        if method is Method.STEPS:
            fitted = link_of_steps(self._config.backend, self._of_run.size, steps)
            if fitted is not None:
                return fitted
        step_s = self._step_s()
        return self._beside_load(partial(self._measured, stream, steps, step_s), step_s)

    def refine(self, plan: Plan, link: Link) -> Link:
        """The link with what rehearsed steps of the plan took, if the link decided the plan.

        What a link leaves out of the steps of a plan by priority or in halves is kept as
        `missing_s`, the factor by which it misses those of any other plan as `in_steps`. A plan in
        another order or with another credit than the guess is rehearsed on a backend opened as it
        asks; not with dedicated servers, which expect a single probe.

        Args:
            plan: shared by all ranks.
            link: as `measure` gave it.
        """
        asked = group_for(plan, self._of_run)
        reopens = replace(asked, name=PROBE) != self._group
        possible = self._rehearses(plan) and not (reopens and asked.num_servers)
        method = second_method(plan, is_final=self._is_final, can_rehearse=possible)
        if self._is_final:
            return link
        extra = {key: value for key, value in link.extra.items() if key != "missing_s"}
        if method is not Method.NONE and reopens:
            role = self.role
            self._close()
            self._open(role, replace(asked, name=PROBE_AGAIN))
        if method is Method.STEPS:
            extra["missing_s"] = missing_s(link, self._costs(plan, NUM_COUNTED))
        elif method is Method.RATIO:
            extra["in_steps"] = self._in_steps(plan, link)
        extra = {key: value for key, value in extra.items() if value != []}
        return msgspec.structs.replace(link, extra=extra)

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
