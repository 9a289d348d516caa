"""The frozen types that every part shares; torch appears in annotations only.

An exchange is two half-steps (style of Rabenseifner, 2004): *fold* brings the sum of each shard to
one place, *spread* brings the result back to all. A ring owns a shard in a worker, a parameter
server in a server; the ops below name the half-steps and the wholes alike for both.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# A gather around a ring sends payloads of up to so many bytes to all ranks at once instead: below
# that its hops would take longer than its bytes. Backend and prediction go by the same number.
AT_ONCE_BYTES = 16 << 10

# A payload that servers merge is cut into one for each server if its message has so many bytes
# uncompressed; below that whole keys shared out among servers do as well, with fewer messages.
CUT_BYTES = 8 << 20

# Consistencies: of a backend that exchanges nothing, so that every worker trains alone; and others.
NOTHING_MOVES = "none"
BSP = "bsp"  # every step needs every rank
IN_STEP = (BSP, NOTHING_MOVES)  # ranks take each step together, or alone as if they did


class Op(enum.StrEnum):
    """What a backend can be asked to do; a backend declares which of them it can."""

    ALL_REDUCE = "all-reduce"  # each rank's tensor becomes the sum over ranks: fold, then spread
    # First half of a sum: each shard's sum ends up with its owner. Until the spread has ended, what
    # else stands in the tensor is undefined.
    FOLD = "fold"
    SPREAD = "spread"  # second half: the folded shards come back into the tensors of all ranks
    ALL_GATHER = (
        "all-gather"  # one-dimensional tensors of unequal sizes come to all ranks, in rank order
    )
    ALL_TO_ALL = (
        "all-to-all"  # one one-dimensional part for each rank, sizes known to the sender alone
    )
    MERGE = "merge"  # a gather whose payloads servers merge into one for all, or one for each range
    BROADCAST = "broadcast"  # the root's tensor replaces those of all others
    BARRIER = "barrier"  # nobody goes on before all have come
    INSTALL = "install"  # rank 0's parameters and the optimizer go to the parameter servers
    APPLY = "apply"  # a gradient goes to the server's optimizer, updated parameters come back


# What needs no parameter server.
SERVERLESS_OPS = frozenset(Op) - {Op.MERGE, Op.INSTALL, Op.APPLY}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that left and reached a rank; payload and headers apart.

    A rank's colocated server counts as part of the rank, and what a rank says to its own server
    never leaves the host: it stands in `local_bytes` alone.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    header_bytes: int = 0
    local_bytes: int = 0
    num_messages: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.header_bytes + other.header_bytes,
            self.local_bytes + other.local_bytes,
            self.num_messages + other.num_messages,
        )

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes - other.sent_bytes,
            self.received_bytes - other.received_bytes,
            self.header_bytes - other.header_bytes,
            self.local_bytes - other.local_bytes,
            self.num_messages - other.num_messages,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One exchange that a rank submits; all ranks of a group submit the same ones.

    Attributes:
        op: what is to be done.
        tensor: the rank's tensor, worked on in place (contiguous); for ALL_GATHER and MERGE it
            is left as it is; None for a barrier and for ALL_TO_ALL.
        key: names the tensor in errors, event records and on a server; equal on all ranks.
        step: the training step, for errors and event records.
        priority: smaller is more urgent; used where the backend was opened with `order=priority`.
        channel: requests of one channel run one after another, of several channels at once.
        root: source of a broadcast.
        learning_rate: for APPLY: the rate of this step.
        note: for INSTALL: the optimizer in words that the server understands (JSON); for MERGE: the
            merger, made by `testbed.compression.server_merge.describe`.
        parts: for ALL_TO_ALL: `parts[r]` goes to rank r; one dimension, one dtype, any sizes;
            the receiver does not know them beforehand. For MERGE in place of the tensor: a payload
            of each range of the message's elements, as many as `Capabilities.num_mergers`; `note`
            then holds their mergers, one in each line.
    """

    op: Op
    tensor: torch.Tensor | None = None
    key: str = ""
    step: int = 0
    priority: int = 0
    channel: int = 0
    root: int = 0
    learning_rate: float = 0.0
    note: str = ""
    parts: tuple[torch.Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The one tensor, or the parts; empty without any."""
        return self.parts if self.tensor is None else (self.tensor,)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, 0 without any."""
        return sum(t.nbytes for t in self.tensors)

    def __str__(self) -> str:
        what = f" of {self.key!r}" if self.key else ""
        return f"{self.op}{what} ({self.num_bytes} bytes) in step {self.step}"


@dataclass(frozen=True, slots=True)
class Result:
    """What an exchange brought to this rank.

    Attributes:
        tensor: the request's tensor, now holding the result; for MERGE: the one payload for all.
        parts: for ALL_GATHER: the tensors of all ranks, in rank order; for ALL_TO_ALL: what each
            rank sent here, in rank order, the own part included; for MERGE of parts: one payload
            for all of each range.
        traffic: bytes that this rank sent and received for it.
        version: for APPLY: number of updates that the returned parameters hold.
        staleness: for APPLY: how many clocks the slowest worker was behind when this rank went on.
        lossless: for MERGE: the payload was packed by `Merger.pack_mean` (see
            `testbed.compression.server_merge.Pulled`).
    """

    tensor: torch.Tensor | None = None
    parts: tuple[torch.Tensor, ...] = ()
    traffic: Traffic = Traffic()
    version: int | None = None
    staleness: int | None = None
    lossless: bool = True


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an opened backend can do, declared instead of stubs that raise.

    Attributes:
        ops: the ops that `submit` takes.
        num_channels: how many channels run at once; channels are 0 .. num_channels - 1.
        consistency: `bsp`, `ssp:<staleness>`, `async` or `none` (see `NOTHING_MOVES`).
        device_types: where tensors may live without being copied by the caller.
        num_helper_processes: processes beside this rank that work for it (colocated servers).
        exact_order: additions happen in rank order, so results do not depend on timing.
        num_mergers: servers that merge, each a range of a message that comes in parts; 1 without.
        repacks: servers that merge encode the mean again, with error feedback of their own; None:
            where the authors of the compressor do.
        settled: the backend's options with what was measured when it was opened (mpi-ring: where it
            changes the algorithm), so that opening it again measures nothing; None = nothing was.
    """

    ops: frozenset[Op]
    num_channels: int = 1
    consistency: str = "bsp"
    device_types: frozenset[str] = frozenset({"cpu"})
    num_helper_processes: int = 0
    exact_order: bool = True
    num_mergers: int = 1
    repacks: bool | None = None
    settled: object | None = None

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange anything; else each trains alone."""
        return self.consistency != NOTHING_MOVES


@dataclass(frozen=True, slots=True)
class Event:
    """When one exchange passed its three gates on this rank, in seconds of one local clock."""

    op: str
    key: str
    step: int
    channel: int
    num_bytes: int
    submitted_s: float
    started_s: float
    ended_s: float


# What an event of a compressed message is, beside the ops of its rounds.
ENCODE, DECODE, WHOLE = "encode", "decode", "compressed"


def shard_bounds(num_elements: int, num_shards: int) -> tuple[int, ...]:
    """Offsets that cut a tensor into shards of `ceil(n / shards)` elements, the last ones shorter.

    Example:
        >>> shard_bounds(10, 4)
        (0, 3, 6, 9, 10)
    """
    chunk = -(-num_elements // num_shards) if num_elements else 0
    return tuple(min(i * chunk, num_elements) for i in range(num_shards + 1))
