"""Carries out the conversations of a compressor over a backend, beside the training.

For each message: an encoder's thread computes its first round as soon as its gradients are ready,
the backend carries the round out, a decoder's thread makes the next round or the mean of the
answer. The training waits for means alone. Encoding one message, exchanging another and decoding a
third overlap.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from testbed.backends.protocol import Backend, PendingResult, Work
from testbed.base.errors import RunFailed
from testbed.base.plan import Plan
from testbed.base.types import DECODE, ENCODE, Capabilities, Op, Request, Result
from testbed.compression import server_merge
from testbed.compression.common import num_bytes
from testbed.compression.protocol import (
    Arrived,
    Compressor,
    Context,
    Merger,
    Round,
    feeds_back,
)
from testbed.training.compressed.channel_order import ChannelOrder, WorkerThread
from testbed.training.compressed.spec import Compression, compressors_of
from testbed.training.compressed.state import States, carried
from testbed.training.compressed.work import (
    CompressedWork,
    Costs,
    Outgoing,
    Relay,
)

_OVER = 2  # when a message of step k ends, none of step k - 2 is under way any more

_Submission = tuple[Request, Callable[[Work], None]]
"""What is to be submitted, and who hears of its work."""


class Conversations:
    """The conversations of one rank, and what its compressor keeps between steps.

    Requests of a fifo channel are submitted in an order that all ranks share: whatever is begun
    first submits all its rounds first (see `ChannelOrder`). Where rank 0 decides the order, rounds
    are submitted as they come. A worker that is alone, or on a backend that exchanges nothing,
    answers its rounds itself.

    Args:
        compression: the compressor.
        backend: opened with the plan's order and channels.
        device: of the gradients.
    """

    def __init__(self, compression: Compression, backend: Backend, device: torch.device) -> None:
        self.states: States = {}
        self.costs: defaultdict[int, Costs] = defaultdict(Costs)
        self.compression = compression
        exchanges = backend.capabilities.exchanges
        self.num_workers = backend.size if exchanges else 1
        self.rank = backend.rank if exchanges else 0
        self._backend = backend
        self._merges = Op.MERGE in backend.capabilities.ops
        self._lock = threading.Lock()
        self._turns: defaultdict[int, ChannelOrder[object, _Submission]] = defaultdict(ChannelOrder)
        self._plan: Plan | None = None
        self._keys: tuple[str, ...] = ()
        self._compressors: Mapping[str, Compressor] = {}
        self._live: set[PendingResult] = set()
        self._failure: BaseException | None = None
        self._encoder = WorkerThread("encode", device)
        self._decoder = WorkerThread("decode", device)

    def adopt(self, plan: Plan, keys: Sequence[str]) -> None:
        """Go on with another plan (nothing is under way); residuals follow their elements.

        Raises:
            UsageError: see `compressors_of`.
        """
        self._compressors = compressors_of(self.compression, plan, keys)
        if self._plan is not None and self.states:
            self.states = carried(self.states, self._plan, self._keys, plan, keys)
        self._plan, self._keys = plan, tuple(keys)

    def kept_tensors(self) -> list[torch.Tensor]:
        """What is kept between steps."""
        return [kept for state in self.states.values() for kept in state.values()]

    @property
    def state_bytes(self) -> int:
        """What is kept between steps."""
        return sum(map(num_bytes, self.states.values()))

    def begin(self, outgoing: Outgoing) -> CompressedWork:
        """A message may leave; the work ends when the mean has taken its place."""
        exchange = CompressedWork(outgoing)
        self._add(exchange)
        self._encoder.give(lambda: self._guarded(exchange, lambda: self._encode(exchange)))
        return exchange

    def submit(self, request: Request) -> Work:
        """A request that is no compressor's, behind all that was begun before it."""
        relay = Relay(request)
        self._add(relay)

        def leave() -> None:
            submission = (request, functools.partial(self._relayed, relay))
            self._submit(relay, submission, request.channel, last=True)

        self._encoder.give(lambda: self._guarded(relay, leave))
        return relay

    def watch(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        """From now on each task of the threads runs within such a context."""
        self._encoder.around = self._decoder.around = around

    def close(self) -> None:
        """End the threads; whatever is still under way fails."""
        self._encoder.close()
        self._decoder.close()
        self._fail(RunFailed("the session was closed before this message had ended"))

    def _add(self, work: PendingResult) -> None:
        with self._lock:
            failure = self._failure
            if failure is None:
                self._live.add(work)
        if failure is not None:
            work.fail(failure)

    def _guarded(self, work: PendingResult, act: Callable[[], None]) -> None:
        if work.done():  # with the failure of another one
            return
        try:
            act()
        except Exception as error:  # handed to whoever waits, who may be any thread
            if isinstance(work, CompressedWork):
                self._fail(work.named(error, self.compression.text))
            else:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Nothing can go on: a rank was lost, or this one has an error that it will report."""
        with self._lock:
            self._failure = self._failure or error
            live = list(self._live)
            self._live.clear()
        for work in live:
            work.fail(error)

    def _encode(self, exchange: CompressedWork) -> None:
        outgoing, context = exchange.outgoing, exchange.outgoing.context
        outgoing.made()
        exchange.stage = "being encoded"
        began_s = time.perf_counter()
        state = self.states.get(exchange.key, {})
        compressor = self._compressors[exchange.key]
        if outgoing.becomes_residual:
            assert feeds_back(compressor)
            context = dataclasses.replace(context, sparse=True)
            exchange.conversation = compressor.send(outgoing.values, state, context)
        else:
            context = dataclasses.replace(context, out=outgoing.values)
            exchange.conversation = compressor.exchange(outgoing.values, state, context)
        self._go_on(exchange, None, began_s)

    def _go_on(self, exchange: CompressedWork, arrived: Arrived | None, began_s: float) -> None:
        """Compute up to the next round, or to the end."""
        conversation = exchange.conversation
        assert conversation is not None
        try:
            given = next(conversation) if arrived is None else conversation.send(arrived)
        except StopIteration as stop:
            outgoing, mean = exchange.outgoing, stop.value.mean
            if mean is not outgoing.values and not outgoing.becomes_residual:
                mean = outgoing.values.copy_(mean)
            self._settle(mean.device)
            self.states[exchange.key] = stop.value.state
            exchange.add_computed(DECODE, began_s)
            self._end(exchange, mean)
            return
        request = None if self.num_workers == 1 else self._request(exchange, given)
        self._settle(exchange.outgoing.values.device)
        exchange.add_computed(ENCODE, began_s)
        exchange.add_round(given, () if request is None else request.parts)
        if request is None:
            own = Arrived(given.parts)  # the only rank is answered with its own part
            self._decoder.give(lambda: self._guarded(exchange, lambda: self._decode(exchange, own)))
        else:
            self._leave(exchange, given, request)

    def _leave(self, exchange: CompressedWork, given: Round, request: Request) -> None:
        exchange.stage = f"in {request.op} {request.key!r}"

        def hear(work: Work) -> None:
            arrive = functools.partial(self._arrive, exchange, request, work)
            work.when_done(lambda: self._decoder.give(lambda: self._guarded(exchange, arrive)))

        self._submit(exchange, (request, hear), request.channel, given.last)

    def _request(self, exchange: CompressedWork, given: Round) -> Request:
        outgoing = exchange.outgoing
        op, note, parts = given.op, "", given.parts
        if self._merges and given.merger is not None and server_merge.can_describe(given.merger):
            op = Op.MERGE
            parts, note = for_servers(
                given.merger,
                given.parts[0],
                outgoing.values,
                self._backend.capabilities,
                outgoing.context.seed,
            )
        whole = len(parts) == 1 and given.op is not Op.ALL_TO_ALL
        return Request(
            op,
            parts[0] if whole else None,
            key=exchange.next_key(),
            step=outgoing.context.step,
            priority=outgoing.priority,
            channel=outgoing.channel,
            note=note,
            parts=() if whole else parts,
        )

    def _submit(self, owner: object, submission: _Submission, channel: int, last: bool) -> None:
        """Submit now, or when it is its turn; all ranks do so in the same order."""
        if self._plan is not None and self._plan.order == "priority":
            begun = self._begin_requests([submission])
        else:
            with self._lock:  # submitted in the order in which they were admitted
                begun = self._begin_requests(self._turns[channel].ask(owner, submission, last))
        self._tell(begun)

    def _end(self, exchange: CompressedWork, mean: torch.Tensor) -> None:
        with self._lock:
            self._live.discard(exchange)
            step = exchange.outgoing.context.step
            self.costs[step] += exchange.costs
            if step - _OVER in self.costs:
                self.costs[step - _OVER] = self.costs[step - _OVER].settled()
            begun = self._begin_requests(self._turns[exchange.outgoing.channel].leave(exchange))
        exchange.succeed(mean)
        self._tell(begun)

    def _begin_requests(
        self, admitted: Sequence[_Submission]
    ) -> list[tuple[Work, Callable[[Work], None]]]:
        return [(self._backend.submit(request), hear) for request, hear in admitted]

    def _tell(self, begun: Sequence[tuple[Work, Callable[[Work], None]]]) -> None:
        # Not under the lock: what has ended already is heard of at once.
        for work, hear in begun:
            hear(work)

    def _arrive(self, exchange: CompressedWork, request: Request, work: Work) -> None:
        combined = work.wait(0.0)
        exchange.add_exchanged(work, combined)
        self._decode(exchange, arrived_of(request.op, combined))

    def _decode(self, exchange: CompressedWork, arrived: Arrived) -> None:
        exchange.stage = "being decoded"
        self._go_on(exchange, arrived, time.perf_counter())

    def _relayed(self, relay: Relay, work: Work) -> None:
        def end() -> None:
            with self._lock:
                self._live.discard(relay)
            relay.take(work)

        # Not on the thread that ends it, which may hold locks of its own.
        work.when_done(lambda: self._decoder.give(end))

    def _settle(self, device: torch.device) -> None:
        """What was computed on a GPU is there before others read it, and its time is known."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def context(
        self, key: str, step: int, shapes: tuple[tuple[int, ...], ...], learning_rate: float | None
    ) -> Context:
        """What the compressor is told of a message."""
        return Context(
            rank=self.rank,
            num_workers=self.num_workers,
            step=step,
            seed=self.compression.seed,
            key=key,
            shapes=shapes,
            learning_rate=learning_rate,
        )


def arrived_of(op: Op, combined: Result) -> Arrived:
    """What a conversation is answered with."""
    if op is Op.ALL_REDUCE:
        assert combined.tensor is not None
        return Arrived((combined.tensor,))
    if op is not Op.MERGE:
        return Arrived(combined.parts)
    if combined.tensor is not None:
        return server_merge.Pulled(combined.tensor, combined.lossless).arrived()
    pieces = (server_merge.Pulled(part, combined.lossless).arrived() for part in combined.parts)
    return Arrived(pieces=tuple(pieces))


def for_servers(
    merger: Merger, payload: torch.Tensor, like: torch.Tensor, servers: Capabilities, seed: int
) -> tuple[tuple[torch.Tensor, ...], str]:
    """The payload for the server of its key, or cut into one for each; and the mergers in words.

    A single server's link would carry the payloads of all workers, and what they are merged into
    to all workers, while those of the others are idle.
    """
    bounds = server_merge.bounds_of(merger, like, servers.num_mergers)
    again = server_merge.encoder_of(merger, servers.repacks)
    notes = [
        server_merge.describe(merger, high - low, like.dtype, again, seed)
        for low, high in itertools.pairwise(bounds)
    ]
    return server_merge.cut(merger, payload, like, bounds), "\n".join(notes)
