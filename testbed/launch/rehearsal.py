"""A second copy of a replayed workload, to see what messages cost beside it and in its steps."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from testbed.backends.protocol import Backend, Group
from testbed.config import RunConfig
from testbed.nouns import Verb
from testbed.profiling.added import added_s
from testbed.profiling.step import Step
from testbed.scheduling.plan import Plan
from testbed.training.replica import Replica
from testbed.training.session import Session
from testbed.training.step import update

# The first step is not like the others (it learns), and the second meets its late end.
NUM_IGNORED = 2
NUM_COUNTED = 4
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
        Means over the ranks of `added_s`, of `NUM_COUNTED` steps.

        Raises:
            RankLost, DeadlineExceeded: as in training.
        """
        group.control.set_state("rehearsing a few steps")
        session = Session(
            *(self.replica.model, self.replica.optimizer, backend, group.control),
            plan=plan,
            patience_s=0.8 * group.deadline_s,
            check_finite=self.replica.scaler is None,
            on_resume=self.replica.workload.on_resume,
        )
        samples: list[tuple[int, str, int, float]] = []
        for number in range(NUM_IGNORED + NUM_COUNTED):
            if number == NUM_IGNORED:
                session.flush()
            before = session.events
            self.compute()
            if self.config.clip_norm is not None or self.replica.scaler is not None:
                session.synchronize()
            update(self.replica, self.config.clip_norm)
            if number >= NUM_IGNORED and session.events is not before:
                samples += added_s(session.events)
        before = session.events
        session.close()
        if session.events is not before:
            samples += added_s(session.events)
        return self._of_all(samples, group)

    def _of_all(
        self, mine: list[tuple[int, str, int, float]], group: Group
    ) -> list[list[tuple[int, float]]]:
        told = group.control.all_gather(
            "rehearsed", msgspec.msgpack.encode(sorted(mine)), TELL_S, members=group.size
        )
        kind = list[tuple[int, str, int, float]]
        ranks = [msgspec.msgpack.decode(text, type=kind) for text in told]
        steps: dict[int, list[tuple[int, float]]] = {}
        for same in zip(*ranks, strict=True):
            step, _, num_bytes, _ = same[0]
            mean_s = sum(time_s for *_, time_s in same) / len(same)
            steps.setdefault(step, []).append((num_bytes, mean_s))
        return list(steps.values())


def can_rehearse(plan: Plan, backend: Backend, compressor: str) -> bool:
    """Whether `costs` tells more than messages in a row, and the backend has what it needs."""
    capabilities = backend.capabilities
    sums = Verb.SUM in capabilities.verbs and Verb.APPLY not in capabilities.verbs
    plain = compressor == RunConfig().compressor
    by_priority = plan.order == "priority" and backend.size > 1
    return by_priority and plain and sums and capabilities.consistency != "none"
