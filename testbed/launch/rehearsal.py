"""A second copy of a replayed workload, to see what messages cost beside it and in its steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from operator import itemgetter

import msgspec

from testbed.backends.protocol import Backend, Group
from testbed.config import RunConfig
from testbed.nouns import Verb
from testbed.profiling.added import Samples, added_s
from testbed.profiling.step import Step
from testbed.scheduling.plan import Plan
from testbed.training.replica import Replica
from testbed.training.session import Session
from testbed.training.step import update

# The first step is not like the others (it learns), and the second meets its late end.
NUM_IGNORED = 2
LEAST_COUNTED, NUM_COUNTED = 4, 16
BUDGET_S = 32.0  # for the counted steps, whose times drift where messages keep all cores busy
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
        self.compute()
        update(self.replica, self.config.clip_norm)

    def costs(self, plan: Plan, backend: Backend, group: Group) -> list[list[tuple[int, float]]]:
        """For each step bytes of the plan's messages and the seconds that each adds; collective.

        Messages that go by priority are decided one by one, while gradients come and parameters
        are awaited one by one: no row of messages that are all there at once shows what that costs.
        Means over the ranks of `added_s`, of up to `NUM_COUNTED` steps; a rank that waits for a
        later one counts its wait, as it does in training. None where a step takes a minute.

        Raises:
            RankLost, DeadlineExceeded: as in training.
        """
        group.control.set_state("rehearsing a few steps")
        session = Session(
            *(self.replica.model, self.replica.optimizer, backend, group.control),
            plan=plan,
            patience_s=0.8 * self.config.deadline,
            check_finite=self.replica.scaler is None,
            on_resume=self.replica.workload.on_resume,
        )
        began_s = time.perf_counter()
        self._step(session)
        num_counted = _affordable(time.perf_counter() - began_s, group)
        if num_counted == 0:
            session.close()
            return []
        for _ in range(1, NUM_IGNORED):
            self._step(session)
        session.flush()
        seen = session.events
        mine: list[Samples] = []
        for _ in range(num_counted):
            self._step(session)
            if session.events is not seen:
                seen = session.events
                mine.append(added_s(seen))
        session.close()
        if session.events is not seen:
            mine.append(added_s(session.events))
        return _of_all(mine, group)

    def _step(self, session: Session) -> None:
        self.compute()
        if self.config.clip_norm is not None or self.replica.scaler is not None:
            session.synchronize()
        update(self.replica, self.config.clip_norm)


def _affordable(step_s: float, group: Group) -> int:
    """How many steps to count, by what the first one took on rank 0."""
    mine = min(NUM_COUNTED, max(LEAST_COUNTED, int(BUDGET_S / step_s)), int(LONGEST_S / step_s))
    told = group.control.all_gather("rehearsal", bytes([mine]), TELL_S, members=group.size)
    return told[0][0]


def _of_all(mine: list[Samples], group: Group) -> list[list[tuple[int, float]]]:
    """Means over the ranks; only times are told, in an order that all ranks share."""
    steps = [sorted(samples, key=itemgetter(0, 1)) for samples in mine]
    times = [[time_s for *_, time_s in step] for step in steps]
    told = group.control.all_gather(
        "rehearsed", msgspec.msgpack.encode(times), TELL_S, members=group.size
    )
    ranks = [msgspec.msgpack.decode(text, type=list[list[float]]) for text in told]
    means = [
        [sum(of_ranks) / len(of_ranks) for of_ranks in zip(*step, strict=True)]
        for step in zip(*ranks, strict=True)
    ]
    return [
        [(num_bytes, mean_s) for (_, _, num_bytes, _), mean_s in zip(step, mean, strict=True)]
        for step, mean in zip(steps, means, strict=True)
    ]


def can_rehearse(plan: Plan, backend: Backend, compressor: str) -> bool:
    """Whether `costs` tells more than messages in a row, and the backend has what it needs.

    Not under a compressor, whose messages are of other sizes, nor where servers update parameters.
    """
    capabilities = backend.capabilities
    sums = Verb.SUM in capabilities.verbs and Verb.APPLY not in capabilities.verbs
    plain = compressor == RunConfig().compressor
    by_priority = plan.order == "priority" and backend.size > 1
    return by_priority and plain and sums and capabilities.consistency != "none"
