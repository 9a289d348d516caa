"""N ranks in one thread: the reference for drivers of compressors over a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from testbed.base.errors import Disagreement
from testbed.base.types import Op
from testbed.compression import server_merge
from testbed.compression.protocol import (
    Arrived,
    Compressor,
    Context,
    Conversation,
    Exchanged,
    Round,
    State,
)

Answer = Callable[[Sequence[Round]], list[Arrived]]


@dataclass
class Lockstep:
    """The ranks of a job, their states between steps, and the bytes that each handed over.

    Attributes:
        compressor: the same on all ranks.
        num_workers: P.
        seed: of the run.
        shapes: see `Context.shapes`.
        key: see `Context.key`.
        answer: how a round of all ranks is carried out; None = as the backends do.
        servers: merge what has a merger, where the backend has such servers.
        states: of all ranks.
        step: the next step.
        given_bytes: of each rank, summed over steps; parts for oneself are not counted.
        sum_dtypes: in which sums have travelled.

    Example:
        >>> from testbed.compression.casts import Dense
        >>> job = Lockstep(Dense(), num_workers=2)
        >>> [done.mean.item() for done in job.exchange([torch.ones(1), torch.zeros(1)])]
        [0.5, 0.5]
    """

    compressor: Compressor
    num_workers: int
    seed: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    key: str = "message"
    answer: Answer | None = None
    servers: MergingServers | None = None
    states: list[State] = field(default_factory=list)
    step: int = 0
    given_bytes: list[int] = field(default_factory=list)
    sum_dtypes: set[torch.dtype] = field(default_factory=set)

    def exchange(
        self, values: Sequence[torch.Tensor], learning_rate: float | None = None
    ) -> list[Exchanged]:
        """One step: each rank's values in, what each rank got out."""
        self.states = self.states or [{} for _ in values]
        self.given_bytes = self.given_bytes or [0] * len(values)
        context = Context(
            num_workers=self.num_workers,
            step=self.step,
            seed=self.seed,
            key=self.key,
            shapes=self.shapes,
            learning_rate=learning_rate,
        )
        conversations = [
            self.compressor.exchange(v, s, replace(context, rank=rank))
            for rank, (v, s) in enumerate(zip(values, self.states, strict=True))
        ]
        done = self._converse(conversations, values[0], replace(context, rank=self.num_workers))
        self.states = [d.state for d in done]
        self.step += 1
        return done

    def _converse(
        self, conversations: Sequence[Conversation], like: torch.Tensor, context: Context
    ) -> list[Exchanged]:
        answers: list[Arrived] | None = None
        number = 0
        while True:
            rounds, ended = [], []
            for rank, each in enumerate(conversations):
                try:
                    rounds.append(next(each) if answers is None else each.send(answers[rank]))
                except StopIteration as stop:
                    ended.append(stop.value)
            if ended and rounds:
                raise Disagreement(
                    f"{len(ended)} of {len(conversations)} ranks have ended, the others go on"
                )
            if ended:
                return ended
            for rank, given in enumerate(rounds):
                self.given_bytes[rank] += handed_over_bytes(given, rank)
                if given.op is Op.ALL_REDUCE:
                    self.sum_dtypes.add(given.parts[0].dtype)
            number += 1
            if self.servers is not None and self.num_workers > 1:
                key = self.key if number == 1 else f"{self.key} (round {number})"
                answers = self.servers.answer(rounds, like, replace(context, key=key))
            else:
                answers = (self.answer or carry_out)(rounds)


@dataclass
class MergingServers:
    """The servers of a job that merge payloads, with what they keep from step to step.

    Attributes:
        num_mergers: how many servers, see `Capabilities`.
        repacks: they encode means again, with feedback of their own; None: where the authors do.
        states: of each server, by key.
    """

    num_mergers: int = 1
    repacks: bool | None = None
    states: dict[tuple[int, str], State] = field(default_factory=dict)

    def answer(
        self, rounds: Sequence[Round], like: torch.Tensor, context: Context
    ) -> list[Arrived]:
        """One round of all ranks; without a merger that servers know it is carried out as others.

        Args:
            rounds: of all ranks.
            like: [n], size and dtype of the message.
            context: of a server: no worker's rank, and the round's own key.
        """
        merger = rounds[0].merger
        if merger is None or not server_merge.can_describe(merger):
            return carry_out(rounds)
        bounds = server_merge.bounds_of(merger, like, self.num_mergers)
        cut = [server_merge.cut(merger, given.parts[0], like, bounds) for given in rounds]
        pieces = []
        for number, payloads in enumerate(zip(*cut, strict=True)):
            part = like[bounds[number] : bounds[number + 1]]
            again = server_merge.encoder_of(merger, self.repacks)
            kept = self.states.get((number, context.key), {})
            if "residual" in kept and kept["residual"].shape != part.shape:
                kept = {}  # of a message of another plan
            pulled, after = server_merge.merge(merger, payloads, part, kept, context, again)
            self.states[number, context.key] = after
            pieces.append(pulled.arrived())
        arrived = pieces[0] if len(pieces) == 1 else Arrived(pieces=tuple(pieces))
        return [arrived for _ in rounds]


def handed_over_bytes(given: Round, rank: int) -> int:
    """Bytes of a round's parts without the part for oneself.

    Example:
        >>> handed_over_bytes(Round(Op.ALL_TO_ALL, (torch.zeros(1), torch.zeros(2))), 0)
        8
    """
    own = given.parts[rank] if given.op is Op.ALL_TO_ALL else torch.empty(0)
    return given.num_bytes - own.numel() * own.element_size()


def carry_out(rounds: Sequence[Round]) -> list[Arrived]:
    """One round of all ranks; sums are added in rank order.

    Raises:
        Disagreement: the ranks ask for different operations.

    Example:
        >>> carry_out([Round(Op.ALL_REDUCE, (torch.ones(1),))] * 2)[0].parts
        (tensor([2.]),)
    """
    ops = {given.op for given in rounds}
    if len(ops) > 1:
        raise Disagreement(f"ranks ask for different operations: {', '.join(sorted(ops))}")
    (op,) = ops
    if op is Op.ALL_REDUCE:
        total = rounds[0].parts[0].clone()
        for given in rounds[1:]:
            total += given.parts[0]
        return [Arrived((total.clone(),)) for _ in rounds]
    if op is Op.ALL_GATHER:
        return [Arrived(tuple(given.parts[0] for given in rounds)) for _ in rounds]
    return [Arrived(tuple(given.parts[rank] for given in rounds)) for rank in range(len(rounds))]
