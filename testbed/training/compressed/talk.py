"""One message's conversation under way, as the exchange that the session waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from testbed.backends.protocol import Work
from testbed.compression.protocol import Context, Conversation, Round
from testbed.errors import RunFailed, TestbedError
from testbed.nouns import Combined, Event, Traffic
from testbed.training.compressed.costs import Costs
from testbed.training.compressed.promise import Promise

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


class Talk(Promise):
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

    def add_exchanged(self, work: Work, combined: Combined) -> None:
        """Count a round that has ended."""
        event = work.event
        self.costs += Costs(rounds_s=((event.started_s, event.ended_s),))
        self.traffic += combined.traffic
        self.details.append(event)

    def finish(self) -> None:
        """The mean is in place."""
        self._ended_s = time.perf_counter()
        self.stage = "done"
        self.succeed(Combined(self.outgoing.values, traffic=self.traffic))

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

    def _event(self, verb: str, submitted_s: float, started_s: float, ended_s: float) -> Event:
        outgoing = self.outgoing
        size = self.costs.dense_bytes
        step, channel = outgoing.context.step, outgoing.channel
        return Event(verb, self.key, step, channel, size, submitted_s, started_s, ended_s)
