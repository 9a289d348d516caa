"""N ranks in one thread: the reference for drivers of compressors over a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from testbed.base.errors import Disagreement
from testbed.base.types import Op
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
        states: of all ranks.
        step: the next step.
        given_bytes: of each rank, summed over steps; parts for oneself are not counted.

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
    states: list[State] = field(default_factory=list)
    step: int = 0
    given_bytes: list[int] = field(default_factory=list)

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
        done = self._converse(conversations)
        self.states = [d.state for d in done]
        self.step += 1
        return done

    def _converse(self, conversations: Sequence[Conversation]) -> list[Exchanged]:
        answers: list[Arrived] | None = None
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
            answers = (self.answer or carry_out)(rounds)


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
