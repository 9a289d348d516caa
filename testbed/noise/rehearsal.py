"""A second copy of a replayed workload, to see what messages cost beside it and in its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import TypeVar

import msgspec
import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.axes import COMPRESSORS
from testbed.base.config import RunConfig
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.base.types import Event, Op
from testbed.control.protocol import decided_by_first
from testbed.noise.steady import quietest
from testbed.noise.steal_time import StealTime
from testbed.profiling.overhead import Step, training_step
from testbed.training.replica import Replica, make_replica, sample_order, update
from testbed.training.sampling import SampleCursor
from testbed.training.session import Session
from testbed.workloads.workload import Workload

SHORTEST_S = 1e-7  # between two moments that the clock cannot resolve

_PER_SUM = {Op.ALL_REDUCE.value: 1, Op.FOLD.value: 2, Op.SPREAD.value: 2}  # ops that make a sum

# Step, key, bytes and seconds of each message.
Samples = list[tuple[int, str, int, float]]

# The first step is not like the others (it learns), the second meets its late end, and the one
# after is often still slower than the rest.
NUM_IGNORED = 3
LEAST_COUNTED, FEW_COUNTED, NUM_COUNTED = 4, 6, 10
BUDGET_S = 30.0  # for the counted steps, whose times drift where messages keep all cores busy
LONGEST_S = 60.0  # all of them; a step that takes longer is not rehearsed
TELL_S = 600.0


@dataclass(frozen=True)
class Rehearsal:
    """One step of a replayed workload: what its host does while messages are under way.

    The device that it stands for computes elsewhere, so that a step beside the messages takes no
    longer than one without; a workload that computes on the host itself would be slowed by them.

    Attributes:
        config: of the run.
        replica: nobody else's.
        compute: forward and backward passes of the replica.
    """

    config: RunConfig
    replica: Replica
    compute: Step

    def load(self) -> None:
        """A step without messages."""
        if self.replica.workload.on_resume is not None:
            self.replica.workload.on_resume()  # the time since the last one is not made up for
        self.compute()
        update(self.replica, self.config.clip_norm)

    def costs(
        self, plan: Plan, backend: Backend, group: Group, num_steps: int = NUM_COUNTED
    ) -> list[list[tuple[int, float]]]:
        """For each step, bytes and seconds of the plan's messages (`message_costs`); collective.

        Messages by priority are chosen one by one while gradients arrive, and halves are exchanged
        apart, so a row of messages that are all ready at once does not show what they cost.

        Args:
            plan: to be rehearsed.
            backend: opened for the plan, with nothing under way.
            group: the job's ranks.
            num_steps: steps to measure, at most; the first steps are not among them.

        Returns:
            Of each step the times of the rank on which they add up to the most; of steps that a
                virtual machine's host disturbed only the quietest. Nothing where a step takes a
                minute.

        Raises:
            RankLost, DeadlineExceeded: as in training.
        """
        group.control.state = "rehearsing a few steps"
        session = Session(
            *(self.replica.model, self.replica.optimizer, backend, group.control),
            plan=plan,
            patience_s=0.8 * self.config.deadline,
            check_finite=self.replica.scaler is None,
            on_resume=self.replica.workload.on_resume,
        )
        began_s = time.perf_counter()
        self._step(session)
        num_counted = _affordable(time.perf_counter() - began_s, num_steps, group)
        if num_counted == 0:
            session.close()
            return []
        for _ in range(1, NUM_IGNORED):
            self._step(session)
        session.flush()
        seen = session.events
        mine: list[Samples] = []
        taken = StealTime()
        stolen: list[float] = []
        for _ in range(num_counted):
            self._step(session)
            stolen.append(taken.share())
            if session.events is not seen:
                seen = session.events
                mine.append(message_costs(seen))
        session.close()
        if session.events is not seen:
            mine.append(message_costs(session.events))
            # Messages of each step went on in the next one.
            stolen = [max(both) for both in pairwise([*stolen, taken.share()])]
        return _of_all(mine, stolen, group)

    def _step(self, session: Session) -> None:
        self.compute()
        if self.config.clip_norm is not None or self.replica.scaler is not None:
            session.synchronize()
        update(self.replica, self.config.clip_norm)


def _affordable(step_s: float, most: int, group: Group) -> int:
    """How many steps to count, by what the first one took on rank 0."""
    mine = min(most, max(LEAST_COUNTED, int(BUDGET_S / step_s)), int(LONGEST_S / step_s))
    encode = partial(bytes, [mine])
    return decided_by_first(group.control, "rehearsal", encode, TELL_S, group.size)[0]


def _of_all(
    mine: list[Samples], stolen: list[float], group: Group
) -> list[list[tuple[int, float]]]:
    """Of each quiet step one rank's times; only times are told, in an order that all share."""
    steps = [sorted(samples, key=itemgetter(0, 1)) for samples in mine]
    times = [[time_s for *_, time_s in step] for step in steps]
    told = group.control.all_gather(
        "rehearsed", msgspec.msgpack.encode((times, stolen)), TELL_S, members=group.size
    )
    ranks = [
        msgspec.msgpack.decode(text, type=tuple[list[list[float]], list[float]]) for text in told
    ]
    longest = slowest_rank_s([times for times, _ in ranks])
    most_stolen = [max(shares) for shares in zip(*(shares for _, shares in ranks), strict=True)]
    return [
        [
            (num_bytes, time_s)
            for (_, _, num_bytes, _), time_s in zip(steps[number], longest[number], strict=True)
        ]
        for number in quietest(most_stolen, LEAST_COUNTED)
    ]


def message_costs(events: Sequence[Event]) -> Samples:
    """Step, key, bytes and seconds of each sum, in the order in which they ended.

        t_i = e_i - max(e_(i-1), s_i),  twice that for a half of a sum (fold or spread)

    e_i is the end of the i-th exchange of its channel, s_i the moment when this rank submitted it:
    t_i is the time by which the message kept its channel busy for longer. A wait for ranks that
    submitted it later is part of it.

    Args:
        events: of one rank.

    Example:
        >>> times = (("a", 1, 3), ("b", 2, 4))
        >>> events = [Event("all-reduce", k, 0, 0, 8, s, s, e) for k, s, e in times]
        >>> [(key, time_s) for _, key, _, time_s in message_costs(events)]
        [('a', 2), ('b', 1)]
    """
    ended: dict[int, float] = {}
    costs: Samples = []
    for event in sorted(events, key=attrgetter("ended_s")):
        begun_s = max(ended.get(event.channel, event.submitted_s), event.submitted_s)
        ended[event.channel] = event.ended_s
        if event.op in _PER_SUM and event.num_bytes:
            time_s = _PER_SUM[event.op] * max(event.ended_s - begun_s, SHORTEST_S)
            costs.append((event.step, event.key, event.num_bytes, time_s))
    return costs


def slowest_rank_s(ranks: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """For each step the message times of the rank on which they add up to the most.

    While one rank waits for another to submit a message, the channel is busy on it and idle on the
    other. In a model in which all ranks compute alike there is no such wait, so it counts as time
    of the message, on whichever rank it was. The times of one rank add up to no more than the step.

    Args:
        ranks: seconds of each message, for each step of each rank.

    Example:
        >>> slowest_rank_s([[[3.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [2.0, 1.5]]])
        [[3.0, 1.0], [2.0, 1.5]]
    """
    return [list(max(step, key=sum)) for step in zip(*ranks, strict=True)]


def can_rehearse(plan: Plan, backend: Backend, compressor: str) -> bool:
    """Whether `costs` can tell what the plan's messages take: the backend has what it needs.

    Not under a compressor, whose messages are of other sizes, nor where servers update parameters.
    """
    capabilities = backend.capabilities
    wanted = {Op.FOLD, Op.SPREAD} if plan.halves else {Op.ALL_REDUCE}
    sums = wanted <= capabilities.ops and Op.APPLY not in capabilities.ops
    plain = compressor == COMPRESSORS.default
    alone = backend.size == 1 or not capabilities.exchanges
    return plain and sums and not alone


def is_rehearsed(plan: Plan) -> bool:
    """Whether no row of messages tells what this plan's cost, so that the link is fitted to steps.

    Example:
        >>> is_rehearsed(Plan(scheduler="x", names=(), num_elements=(), dtypes=(), messages=()))
        False
    """
    return plan.order == "priority" or plan.halves


def second_copy(
    config: RunConfig, group: Group, workload: Workload
) -> tuple[Replica, Callable[[], tuple[torch.Tensor, ...]], int]:
    """A replica to try things on, what brings it a micro-batch, and that one's samples."""
    order = sample_order(config, workload, group.size)
    batch_size = order.batch_size // config.accumulate
    replica = make_replica(workload, config, 1)
    replica.model.train()
    indices = SampleCursor(order, group.rank).indices(0)[:batch_size]
    return replica, lambda: replica.to_device(workload.train.batch(indices)), batch_size


def rehearsal_of(
    config: RunConfig, group: Group, workload: Workload, build: Callable[[], Workload]
) -> Rehearsal | None:
    """What rehearses another copy of the workload; None for one that is not replayed."""
    if not isinstance(workload.recorded, Trace):
        return None
    replica, fetch, _ = second_copy(config, group, build())
    return Rehearsal(config, replica, training_step(replica.loss, fetch(), replica.scaler))


# Something measured on one thread while this one does what it does in training.

T = TypeVar("T")


def beside(load: Callable[[], object], measure: Callable[[], T], every_s: float = 0.0) -> T:
    """What `measure` returns on a thread of its own, while `load` is repeated on this one.

    A message that a busy host sends takes longer than on an idle one: threads wait for a core and
    for the interpreter. The load that is under way when the measurement ends is finished first.

    Args:
        load: what this thread does.
        measure: what is measured meanwhile.
        every_s: from the beginning of one load to that of the next, at least: where messages take
            longer than what a step computes, the host is idle for the rest of the step.

    Raises:
        BaseException: what either of them raised; after `load` has, `measure` is waited for.

    Example:
        >>> done = []
        >>> beside(lambda: done.append("load"), lambda: "measured")
        'measured'
        >>> "load" in done
        True
    """
    with ThreadPoolExecutor(1, thread_name_prefix="measuring") as pool:
        measured = pool.submit(measure)
        while True:
            began_s = time.perf_counter()
            load()
            wait([measured], max(0.0, began_s + every_s - time.perf_counter()))
            if measured.done():
                break
        return measured.result()
