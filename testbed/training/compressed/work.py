"""One message's conversation under way, as the exchange that the session waits for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

import torch

from testbed.backends.protocol import Work
from testbed.base.errors import DeadlineExceeded, RunFailed, TestbedError
from testbed.base.types import Event, Request, Result, Traffic
from testbed.compression.protocol import Context, Conversation, Round
from testbed.training.compressed.costs import Costs

# An exchange that other threads end: the waiting half of `Work`, and a request passed on.


class Promise:
    """See `Work`; ends once, by `succeed` or `fail`, whichever comes first.

    Attributes:
        stage: what is being done for it, in words.
    """

    def __init__(self, what: str) -> None:
        self.stage = "waiting for its turn"
        self._what = what
        self._result: Future[Result] = Future()

    def succeed(self, result: Result) -> None:
        """The result is in place."""
        with contextlib.suppress(InvalidStateError):  # it has failed meanwhile
            self._result.set_result(result)

    def fail(self, error: BaseException) -> None:
        """There will be no result."""
        with contextlib.suppress(InvalidStateError):  # it has ended meanwhile
            self._result.set_exception(error)

    def done(self) -> bool:
        """See `Work.done`."""
        return self._result.done()

    def wait(self, timeout_s: float | None = None) -> Result:
        """See `Work.wait`."""
        try:
            return self._result.result(timeout_s)
        except TimeoutError:
            if self._result.done():  # it came in this very moment, or is a TimeoutError itself
                return self._result.result()
        raise DeadlineExceeded(
            f"{self._what} was not done within {timeout_s} s; it is {self.stage}; no rank is known "
            "to be lost; raise --deadline if the network is that slow"
        )

    def when_done(self, hear: Callable[[], None]) -> None:
        """See `Work.when_done`."""
        self._result.add_done_callback(lambda ended: hear())


class Relay(Promise):
    """A plain request that takes its turn among conversations.

    Args:
        request: what is to be submitted.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(str(request))
        self._work: Work | None = None

    def take(self, work: Work) -> None:
        """The request has ended; so has this."""
        self._work = work
        try:
            result = work.wait(0.0)
        except Exception as error:  # raised again by whoever waits
            self.fail(error)
        else:
            self.succeed(result)

    @property
    def event(self) -> Event:
        """See `Work.event`."""
        assert self._work is not None
        return self._work.event


ENCODE, DECODE, WHOLE = "encode", "decode", "compressed"


@dataclass(frozen=True)
class Outgoing:
    """A message that may leave.

    Attributes:
        values: [n], this rank's; replaced by the mean when the conversation has ended.
        context: of the message in this step.
        priority: see `Request`.
        channel: see `Request`.
        made: waits until a GPU has computed the values.
    """

    values: torch.Tensor
    context: Context
    priority: int = 0
    channel: int = 0
    made: Callable[[], None] = lambda: None


class CompressedWork(Promise):
    """See `Work`; its event spans the conversation, `details` tell its parts.

    The encoder's, the backend's and the decoder's thread use it one after another, never at once.
    """

    def __init__(self, outgoing: Outgoing) -> None:
        context = outgoing.context
        super().__init__(f"message {context.key!r} of step {context.step}")
        self.outgoing = outgoing
        self.conversation: Conversation | None = None
        self.num_rounds = 0
        self.details: list[Event] = []
        self.costs = Costs(
            dense_bytes=outgoing.values.numel() * outgoing.values.element_size(),
            num_elements=outgoing.values.numel(),
        )
        self.traffic = Traffic()
        self._begun_s = self._ended_s = time.perf_counter()
        self._started_s: float | None = None

    @property
    def key(self) -> str:
        """The message's name."""
        return self.outgoing.context.key

    def next_key(self) -> str:
        """Name of the round that leaves next: the message's own, the later ones numbered."""
        self.num_rounds += 1
        return self.key if self.num_rounds == 1 else f"{self.key} (round {self.num_rounds})"

    def add_round(self, given: Round, sent: tuple[torch.Tensor, ...]) -> None:
        """Count what leaves: `sent` where the round's payload was cut."""
        values, context = self.outgoing.values, self.outgoing.context
        self.costs = self.costs.with_round(given, context.rank, values.element_size(), sent)
        if self._started_s is None:
            self._started_s = time.perf_counter()

    def add_computed(self, what: str, began_s: float) -> None:
        """Count what the conversation computed until now."""
        ended_s = time.perf_counter()
        spent_s = ended_s - began_s
        more = Costs(encode_s=spent_s) if what == ENCODE else Costs(decode_s=spent_s)
        self.costs += more
        self.details.append(self._event(what, began_s, began_s, ended_s))

    def add_exchanged(self, work: Work, combined: Result) -> None:
        """Count a round that has ended."""
        event = work.event
        self.costs += Costs(rounds_s=((event.started_s, event.ended_s),))
        self.traffic += combined.traffic
        self.details.append(event)

    def finish(self) -> None:
        """The mean is in place."""
        self._ended_s = time.perf_counter()
        self.stage = "done"
        self.succeed(Result(self.outgoing.values, traffic=self.traffic))

    def named(self, error: Exception, compressor: str) -> BaseException:
        """An error of the conversation, with the message and the step."""
        if isinstance(error, TestbedError):
            return error
        context = self.outgoing.context
        failure = RunFailed(
            f"compressor {compressor!r} failed on message {self.key!r} in step {context.step} on "
            f"rank {context.rank} while {self.stage}: {type(error).__name__}: {error}"
        )
        failure.__cause__ = error
        return failure

    @property
    def event(self) -> Event:
        """See `Work.event`."""
        return self._event(WHOLE, self._begun_s, self._started_s or self._begun_s, self._ended_s)

    def _event(self, op: str, submitted_s: float, started_s: float, ended_s: float) -> Event:
        outgoing = self.outgoing
        size = self.costs.dense_bytes
        step, channel = outgoing.context.step, outgoing.channel
        return Event(op, self.key, step, channel, size, submitted_s, started_s, ended_s)
