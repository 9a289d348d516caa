"""How far a step of a session is, what it has waited for, and which ranks it needs."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from testbed.backends.protocol import Work
from testbed.base.errors import DeadlineExceeded
from testbed.base.recorder import Recorder
from testbed.base.types import Event, Result
from testbed.control.protocol import Control, Loss
from testbed.training.exchange.setup import AGREE_S

CPU: Final = torch.device("cpu")


def now_on(device: torch.device) -> Any:
    """This moment on the clock of a GPU, where what was queued before has ended; else None.

    The host queues work ahead of the GPU: what it stands waiting for holds compute as well.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def passed_s(moments: Iterable[tuple[Any, Any]]) -> float:
    """Seconds on the device between the two moments of each pair, in sum; waits for them."""
    total_s = 0.0
    for begin, end in moments:
        end.synchronize()
        total_s += begin.elapsed_time(end) / 1e3
    return total_s


class Phase(enum.Enum):
    """How far a step is."""

    ACCUMULATING = enum.auto()  # backward passes add to the gradients; nothing is exchanged
    EXCHANGING = enum.auto()  # a gradient is exchanged as soon as it is ready
    SYNCHRONIZED = enum.auto()  # gradients are means; the optimizer has not stepped yet


class StepState:
    """The step that is being computed: how far it is, and what it has waited for.

    Args:
        control: told what this rank waits for; asked what the others do.
        patience_s: how long to wait for a message when all ranks have been fast so far.
        on_resume: called after every wait for a message that had not arrived yet.
        recorder: told of waits, and of what was waited for.
        device: that computes; on a GPU it tells how long it stood waiting.

    Attributes:
        number: of the step.
        is_first: it is the first one of this session.
        phase: how far it is.
        num_begun: 1 + number of the newest step whose gradients this rank has begun to exchange; 0:
            of none.
        staleness: servers without a barrier: how many clocks the slowest worker was behind, last
            seen; None = not known.
    """

    def __init__(
        self,
        control: Control,
        patience_s: float,
        on_resume: Callable[[], None] | None = None,
        recorder: Recorder | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.recorder = recorder
        self._device = device
        self._waits: list[tuple[Any, Any]] = []  # moments of a GPU, begin and end
        self.number = 0
        self.is_first = True
        self.phase = Phase.EXCHANGING
        self.num_begun = 0
        self.staleness: int | None = None
        self._ended: tuple[Loss, int] | None = None
        self._control = control
        self._patience_s = patience_s
        self._on_resume = on_resume
        self._slowest_step_s = 0.0
        self._began_s = time.perf_counter()
        self._waited_s = 0.0
        self._step_waited_s = 0.0
        self._events: list[Event] = []

    def begin_exchange(self) -> None:
        """A gradient of this step is ready: from here on the step needs every rank."""
        self.phase = Phase.EXCHANGING
        self.num_begun = self.number + 1
        if self._ended is not None:
            self._refuse_ended()

    def hear_of_end(self, member: int, who: str, num_begun: int) -> None:
        """A rank has ended its loop; where a step needs it, this rank gives it up."""
        why = (
            f"it ended its training loop after {num_begun} steps, and another rank goes on; "
            "expected as many steps on every rank: give all the same number of batches"
        )
        if self._ended is None or num_begun < self._ended[1]:  # whoever ended first
            self._ended = Loss(member, who, why), num_begun
        self._refuse_ended()

    def _refuse_ended(self) -> None:
        assert self._ended is not None
        loss, num_begun = self._ended
        if self.num_begun > num_begun:
            self._control.give_up(loss)

    def wait(self, work: Work, name: str) -> Result:
        """The result of an exchange.

        Raises:
            RankLost: a rank was lost.
            DeadlineExceeded: all ranks are alive, but one did not come; says what each one does.
        """
        late = not work.done()
        if late:
            self._control.state = f"waiting for the exchange of {name!r} in step {self.number}"
        before_s, before = time.perf_counter(), now_on(self._device)
        # A rank that computes for long does not hang: what was slow may be slow again.
        limit_s = max(self._patience_s, 2 * self._slowest_step_s)
        if self.is_first:
            limit_s = max(limit_s, AGREE_S)  # first steps compile, allocate and connect
        try:
            result = work.wait(limit_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}; {self._control.describe()}") from error
        waited_s = time.perf_counter() - before_s
        if late and self._on_resume is not None:
            self._on_resume()
        if before is None:
            self._waited_s += waited_s
        else:
            self._waits.append((before, now_on(self._device)))
        self._step_waited_s += waited_s
        if result.staleness is not None:
            self.staleness = result.staleness
        self.add_events([work.event])
        if self.recorder is not None:
            channel, end_s = self._events[-1].channel, before_s + waited_s
            self.recorder.computing_since_s = end_s
            self.recorder.add("wait", name, before_s, end_s, channel=channel)
        return result

    def add_events(self, events: list[Event]) -> None:
        """Note the parts of an exchange that was waited for."""
        self._events += events
        if self.recorder is not None:
            for event in events:
                self.recorder.add_exchange(event)

    def end(self) -> None:
        """All gradients have been exchanged or handed to a deferred update: go on to the next."""
        now_s = time.perf_counter()
        if not self.is_first:
            own_s = now_s - self._began_s - self._step_waited_s
            self._slowest_step_s = max(self._slowest_step_s, own_s)
        self._began_s, self._step_waited_s, self.is_first = now_s, 0.0, False
        self.number += 1
        self.phase = Phase.SYNCHRONIZED
        self._control.state = f"computing step {self.number}"

    def take_waited_s(self) -> float:
        """Seconds waited since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        waits, self._waits = self._waits, []
        return waited_s + passed_s(waits)

    def take_events(self) -> list[Event]:
        """Exchanges that were waited for since the last call."""
        events, self._events = self._events, []
        return events
