"""One message's exchange under a compressor, as the work that the session waits for; its costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from testbed.backends.protocol import PendingResult, Work
from testbed.base.errors import RunFailed, TestbedError
from testbed.base.types import ENCODE, WHOLE, Event, Op, Request, Result, Traffic
from testbed.compression.lockstep import handed_over_bytes
from testbed.compression.protocol import Context, Conversation, Round
from testbed.compression.sparse import sparse_count
from testbed.compression.sparse_mean import SparseMerger
from testbed.records.cell import CompressionResult
from testbed.statistics.summary import covered_s

IN_LINE = "waiting for its turn"


class Relay(PendingResult):
    """A plain request that takes its turn among conversations.

    Args:
        request: what is to be submitted.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.stage = IN_LINE
        self._work: Work | None = None

    def take(self, work: Work) -> None:
        """The request has ended; so has this."""
        self._work = work
        try:
            result = work.wait(0.0)
        except Exception as error:  # raised again by whoever waits
            self.fail(error)
        else:
            self.finish(result)

    @property
    def event(self) -> Event:
        """See `Work.event`."""
        assert self._work is not None
        return self._work.event


@dataclass(frozen=True)
class Outgoing:
    """A message that may leave.

    Attributes:
        values: [n], this rank's; replaced by the mean when the conversation has ended, unless they
            become the residual.
        context: of the message in this step.
        priority: see `Request`.
        channel: see `Request`.
        made: waits until a GPU has computed the values.
        becomes_residual: the values are those of `Feedback.send`, whose memory becomes the
            residual; the mean has memory of its own, and is a sparse tensor where the compressor
            can list it.
    """

    values: torch.Tensor
    context: Context
    priority: int = 0
    channel: int = 0
    made: Callable[[], None] = lambda: None
    becomes_residual: bool = False


class CompressedWork(PendingResult):
    """See `Work`; its event spans the conversation, `details` tell its parts.

    The encoder's, the backend's and the decoder's thread use it one after another, never at once.
    """

    def __init__(self, outgoing: Outgoing) -> None:
        context = outgoing.context
        super().__init__(f"message {context.key!r} of step {context.step}")
        self.stage = IN_LINE
        self.outgoing = outgoing
        self.conversation: Conversation | None = None
        self.num_rounds = 0
        self.details: list[Event] = []
        self.costs = Costs(
            dense_bytes=outgoing.values.numel() * outgoing.values.element_size(),
            num_elements=outgoing.values.numel(),
        )
        self.traffic = Traffic()
        self._begun_s = self._ended_s
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

    def succeed(self, mean: torch.Tensor) -> None:
        """The mean is in place."""
        self.stage = "done"
        self.finish(Result(mean, traffic=self.traffic))

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


# What compressing cost: bytes, times and elements, added up over messages and steps.


@dataclass(frozen=True)
class Costs:
    """Sums over messages, on one rank.

    Attributes:
        dense_bytes: of the values, before.
        sent_bytes: handed over, payloads alone; parts for oneself do not count.
        encode_s: until each round could leave.
        rounds_s: beginning and end of each round, without what it waited for its channel.
        settled_s: time during which rounds were under way that `rounds_s` holds no more.
        decode_s: from the last answer to the mean.
        num_elements: of the values.
        num_sent: elements that the payloads carry.
    """

    dense_bytes: int = 0
    sent_bytes: int = 0
    encode_s: float = 0.0
    rounds_s: tuple[tuple[float, float], ...] = ()
    decode_s: float = 0.0
    num_elements: int = 0
    num_sent: int = 0
    settled_s: float = 0.0

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            self.dense_bytes + other.dense_bytes,
            self.sent_bytes + other.sent_bytes,
            self.encode_s + other.encode_s,
            self.rounds_s + other.rounds_s,
            self.decode_s + other.decode_s,
            self.num_elements + other.num_elements,
            self.num_sent + other.num_sent,
            self.settled_s + other.settled_s,
        )

    @property
    def communication_s(self) -> float:
        """Time during which any round was under way; several of them at once count once."""
        return self.settled_s + covered_s(self.rounds_s)

    def settled(self) -> Costs:
        """The same, once no round can be added that was under way beside these.

        Example:
            >>> Costs(rounds_s=((0.0, 2.0), (1.0, 3.0), (5.0, 6.0))).settled().settled_s
            4.0
        """
        return replace(self, rounds_s=(), settled_s=self.communication_s)

    def with_round(
        self, given: Round, rank: int, element_bytes: int, cut: Sequence[torch.Tensor] = ()
    ) -> Costs:
        """With what a round hands over.

        Args:
            given: the round.
            rank: this worker.
            element_bytes: of the values.
            cut: what a gathered payload was cut into, if it was: ranges have shorter indices.
        """
        is_cut = cut and given.op is Op.ALL_GATHER
        parts_bytes = sum(part.nbytes for part in cut)
        return replace(
            self,
            sent_bytes=self.sent_bytes
            + (parts_bytes if is_cut else handed_over_bytes(given, rank)),
            num_sent=self.num_sent + _elements_of(given, self.num_elements, element_bytes),
        )


def _elements_of(given: Round, num_elements: int, element_bytes: int) -> int:
    """How many elements' values a round carries."""
    if given.num_elements is not None:
        return given.num_elements
    if given.op is Op.ALL_REDUCE:
        return given.parts[0].numel()
    if isinstance(given.merger, SparseMerger):
        return sparse_count(given.parts[0].numel(), num_elements, element_bytes)
    return num_elements


def summarise(
    compressor: str,
    steps: Sequence[Costs],
    relative_errors: Sequence[float],
    state_bytes: int,
    note: str,
) -> CompressionResult:
    """The record of one rank's compression.

    Args:
        compressor: as given.
        steps: costs of each measured step.
        relative_errors: of the steps in which the mean was compared with the true one.
        state_bytes: kept between steps.
        note: what else there is to say.

    Example:
        >>> steps = [Costs(dense_bytes=800, sent_bytes=8, num_elements=200, num_sent=2)]
        >>> summarise("topk:ratio=0.01", steps, [0.5, 0.7], 0, "").density
        0.01
    """
    total, count = sum((step.settled() for step in steps), Costs()), max(1, len(steps))
    return CompressionResult(
        compressor=compressor,
        dense_bytes=round(total.dense_bytes / count),
        sent_bytes=round(total.sent_bytes / count),
        encode_s=total.encode_s / count,
        communication_s=total.communication_s / count,
        decode_s=total.decode_s / count,
        relative_error=sum(relative_errors) / len(relative_errors) if relative_errors else None,
        density=total.num_sent / total.num_elements if total.num_elements else None,
        state_bytes=state_bytes,
        note=note,
    )
