"""What workers and servers exchange over ZeroMQ, and the checks that every message must pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from testbed.backends.zmq_ps.wire import Flag, Header, Operation

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Message:
    """One message of a worker to a server, or of a server to a worker (`header.worker`)."""

    header: Header
    payload: torch.Tensor | None = None


class Refused(ValueError):
    """A message that is well formed but does not belong here; it changes nothing."""


class Mismatch(Exception):
    """The workers do not ask for the same exchange."""


def answer(header: Header, worker: int, payload: torch.Tensor | None = None) -> Message:
    """The answer to a worker about the slice that a message named."""
    flags = Flag.NONE if payload is None else Flag.PAYLOAD
    return Message(replace(header, worker=worker, flags=flags, note=b""), payload)


SAME_SLICE = ("key", "step", "dtype", "total_elements", "num_elements", "root")


def check_same(first: Header, other: Header, names: tuple[str, ...] = SAME_SLICE) -> None:
    """Whether two workers speak of the same slice of the same tensor.

    Raises:
        Mismatch: one of the named fields differs.
    """
    for name in names:
        ours, theirs = getattr(first, name), getattr(other, name)
        if ours != theirs:
            raise Mismatch(
                f"{other.operation.name} number {other.sequence}: {name} is {ours!r} on rank "
                f"{first.worker} and {theirs!r} on rank {other.worker}; all ranks must submit the "
                "same exchanges in the same order"
            )


def check_payload_sense(header: Header) -> None:
    """Whether a worker's message carries elements exactly where it should.

    Raises:
        Refused: elements are missing, or there are some where none belong.
    """
    if header.operation in (Operation.ALL_GATHER, Operation.ALL_TO_ALL):  # it may have none for us
        return
    all_give = (Operation.ALL_REDUCE, Operation.FOLD, Operation.APPLY, Operation.MERGE)
    wanted = header.operation in all_give or (
        header.operation in (Operation.BROADCAST, Operation.INSTALL)
        and header.worker == header.root
    )
    if bool(header.flags & Flag.PAYLOAD) != wanted:
        raise Refused(
            f"{header.operation.name} of rank {header.worker} comes "
            f"{'without' if wanted else 'with'} elements"
        )
