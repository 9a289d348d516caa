"""What a compressor is: a generator that yields what is to be exchanged and returns the mean.

Some methods need one collective operation, some two, some log2 of the number of ranks; hence the
generator, called a conversation. It never calls a backend; its driver does, one `Round` at a time:

    conversation = compressor.exchange(values, state, context)
    round = next(conversation)                     # encode
    while True:
        arrived = <carry out round>                # communicate
        try:
            round = conversation.send(arrived)     # decode, or encode the next round
        except StopIteration as stop:
            return stop.value                      # Exchanged(mean, state, subtract_sent)

The driver
- carries out ALL_REDUCE, ALL_GATHER and ALL_TO_ALL (see `Op`) among the same ranks in the same
  order; all ranks yield the same operations in the same order for the same key and step;
- keeps the returned state beside the message (never shared between messages), saves it with a
  checkpoint and measures it with `common.num_bytes`;
- on a parameter server may answer an ALL_GATHER that has a merger with what `server_merge.merge`
  returned (`Arrived.pulled`) instead of with all parts;
- gives a message's tensor shapes in `Context.shapes`: low-rank schemes need matrices.

`testbed.compression.lockstep` drives N ranks in one thread and is the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeGuard, runtime_checkable

import torch

from testbed.base.types import Op

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Context:
    """What a compressor may know besides the values; equal on all ranks but for `rank`.

    Attributes:
        rank: this worker.
        num_workers: P.
        step: training step, from 0.
        seed: of the run; draws depend on seed, key and step (and rank where ranks must differ).
        key: the message's name, equal on all ranks.
        shapes: of the tensors that lie in the message, in order; a slice is one-dimensional.
            Empty: one tensor of one dimension.
        learning_rate: of this step, for schemes that keep updates instead of gradients.
        out: [n], memory in which the mean may be put after the last answer; often that of the
            values. `Exchanged.subtract_sent` then finds the values overwritten, so that a wrapper
            that calls it gives the inner compressor a copy. If it is the values themselves, tensors
            in `state` may be overwritten too. None: the mean is new memory.
        sparse: the mean may be a sparse tensor, see `Exchanged.mean`.
    """

    rank: int = 0
    num_workers: int = 1
    step: int = 0
    seed: int = 0
    key: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    learning_rate: float | None = None
    out: torch.Tensor | None = field(default=None, compare=False, repr=False)
    sparse: bool = field(default=False, compare=False, repr=False)


class Merger(Protocol):
    """How payloads of all ranks become one mean, on every rank or on a server."""

    def combine(self, payloads: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        """The mean [n] of the payloads, in rank order; `like` [n] gives size, dtype and device."""
        ...

    def pack_mean(self, mean: torch.Tensor) -> torch.Tensor:
        """A mean [n] as a payload that loses nothing."""
        ...

    def unpack_mean(self, payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The mean [n] that `pack_mean` packed."""
        ...


@runtime_checkable
class Uniting(Merger, Protocol):
    """A merger that need not make the mean in order to pack it."""

    def unite(self, payloads: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        """`pack_mean(combine(payloads, like))`, byte for byte, but cheaper."""
        ...


@runtime_checkable
class Placing(Merger, Protocol):
    """A merger that can put the mean into memory that is there, which it then returns."""

    def place(self, payloads: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        """`combine`, into `out` [n], whose values do not matter."""
        ...

    def place_mean(self, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`unpack_mean`, into `out` [n], whose values do not matter."""
        ...


@runtime_checkable
class Cutting(Merger, Protocol):
    """A merger whose payloads can be cut into payloads of ranges of the message."""

    def cut(
        self, payload: torch.Tensor, like: torch.Tensor, bounds: tuple[int, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Payloads of the elements `bounds[i] .. bounds[i + 1] - 1`, each as of a message."""
        ...


@runtime_checkable
class Listing(Merger, Protocol):
    """A merger that can list a mean's elements where few were sent, without memory for all."""

    def list_mean(
        self, payloads: tuple[torch.Tensor, ...], like: torch.Tensor
    ) -> torch.Tensor | None:
        """`combine` as a sparse tensor with the same elements; None: too many were sent."""
        ...

    def list_packed(self, payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
        """`unpack_mean` as a sparse tensor with the same elements; None: they are too many."""
        ...


def can_list(merger: Merger) -> TypeGuard[Listing]:
    """Whether it is `Listing`, found out once for each class."""
    return _is_of(type(merger), Listing)


def can_cut(merger: Merger) -> TypeGuard[Cutting]:
    """Whether it is `Cutting`, found out once for each class."""
    return _is_of(type(merger), Cutting)


def can_unite(merger: Merger) -> TypeGuard[Uniting]:
    """Whether it is `Uniting`, found out once for each class: asked for every message."""
    return _is_of(type(merger), Uniting)


def can_place(merger: Merger) -> TypeGuard[Placing]:
    """Whether it is `Placing`, found out once for each class."""
    return _is_of(type(merger), Placing)


@functools.cache
def _is_of(kind: type, protocol: type) -> bool:
    return issubclass(kind, protocol)


@dataclass(frozen=True)
class Round:
    """One exchange that a conversation asks for.

    Attributes:
        op: ALL_REDUCE, ALL_GATHER or ALL_TO_ALL.
        parts: ALL_REDUCE: one tensor, which the exchange may overwrite; ALL_GATHER: one, left as
            it is; ALL_TO_ALL: one for each rank, in rank order, `parts[r]` goes to rank r (the own
            one stays here).
        merger: for ALL_GATHER: what a server may use instead of sending all parts to all.
        last: the answer ends the conversation, so that the channel may go on with another
            message's rounds before this answer is decoded; the same on all ranks.
        num_elements: whose values the parts carry, where neither operation nor merger tells; used
            in the record only.
    """

    op: Op
    parts: tuple[torch.Tensor, ...]
    merger: Merger | None = None
    last: bool = False
    num_elements: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts, the one for itself included."""
        return sum(p.numel() * p.element_size() for p in self.parts)


@dataclass(frozen=True)
class Arrived:
    """The answer to a round.

    Attributes:
        parts: ALL_REDUCE: the one sum; ALL_GATHER: the tensors of all ranks, in rank order;
            ALL_TO_ALL: what each rank sent here, in rank order.
        pulled: for ALL_GATHER with a merger on a server: the server's payload (`server_merge`).
        pieces: for ALL_GATHER with a merger on several servers: the answer of each, for equal
            ranges of the message's elements (`base.types.shard_bounds`), instead of both.
    """

    parts: tuple[torch.Tensor, ...] = ()
    pulled: torch.Tensor | None = None
    pieces: tuple[Arrived, ...] = ()


@dataclass(frozen=True)
class Exchanged:
    """How a conversation ends.

    Attributes:
        mean: [n], the mean over ranks as this compressor delivers it; identical on all ranks. It
            may lie in `Context.out`, or be a sparse tensor where `Context.sparse` allows that:
            its indices ascend, each comes once, and what it does not name is 0.
        state: to be given to the next exchange of this message.
        subtract_sent: turns the values that were given, in place, into what was not sent; returns
            them. Valid once, and before the values are changed otherwise (by `Context.out`, too).
    """

    mean: torch.Tensor
    state: State
    subtract_sent: Callable[[torch.Tensor], torch.Tensor]


Conversation = Generator[Round, Arrived, Exchanged]


@dataclass(frozen=True)
class ByteRange:
    """Bounds on the bytes that one rank hands over in one exchange, all rounds together."""

    least: int
    most: int

    def __add__(self, other: ByteRange) -> ByteRange:
        return ByteRange(self.least + other.least, self.most + other.most)


@dataclass(frozen=True)
class Claims:
    """Properties that a compressor guarantees; tests check them.

    Attributes:
        unbiased: the expectation of what is sent is what was given.
        contraction: delta(values) in (0, 1] with E |C(x) - x|^2 <= (1 - delta) |x|^2; None: none.
        mean_of_sent: the mean is the mean over ranks of what each sent (not so for votes).
        keeps: it keeps a residual itself, so `ef` around it would keep it twice.
        carries_momentum: it applies momentum itself, so the optimizer must have none.
        feedback: it is `Feedback`, and what it keeps counts as a `gradient` or as an `update`.
        requantised: its authors encode the mean again for the way back, so servers do, too.
    """

    unbiased: bool = False
    contraction: Callable[[torch.Tensor], float] | None = None
    mean_of_sent: bool = True
    keeps: bool = False
    carries_momentum: bool = False
    feedback: Literal["none", "gradient", "update"] = "none"
    requantised: bool = False


class Compressor(Protocol):
    """A configured compressor: frozen, without state of its own."""

    @property
    def claims(self) -> Claims:
        """Its properties with these options."""
        ...

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """Send `values` [n] (not changed unless they are `context.out`), receive their mean.

        Args:
            values: this rank's message: one dimension, contiguous, floating point.
            state: what the last exchange of this message returned; {} at first.
            context: rank, step and the like.

        Raises:
            UsageError: not one dimension, or not floating point.
            NonFiniteGradient: NaN or infinity among the values; names message, step and rank.
        """
        ...

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """Bytes that this rank hands over for a message, by the formula of the docstring."""
        ...


@runtime_checkable
class Feedback(Protocol):
    """A compressor that adds what it did not send, `residual` [n] of its state, to the next values.

    Others may add for it, piece by piece and in the residual's own memory: `exchange` of values is
    `send` of values + aging * residual.
    """

    def aging(self, state: State, learning_rate: float | None) -> float:
        """What the residual of `state` is multiplied by in a step of this learning rate.

        Raises:
            UsageError: it depends on the rate, and that is 0 or None.
        """
        ...

    def send(self, wanted: torch.Tensor, state: State, context: Context) -> Conversation:
        """Send `wanted` [n], whose memory becomes the residual's; otherwise as `exchange`."""
        ...


def feeds_back(compressor: Compressor) -> TypeGuard[Feedback]:
    """Whether it is `Feedback`, found out once for each class: asked for every message."""
    return _is_of(type(compressor), Feedback)
