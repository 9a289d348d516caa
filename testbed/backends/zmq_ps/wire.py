"""Every message between a worker and a server: its header on the wire, and its checks; pure.

A message is two frames: this header and the payload, the slice's elements as they lie in memory.
The fixed part (little-endian, no padding) is followed by the key (UTF-8) and a note (bytes).
"""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from testbed.base.dtypes import ELEMENT_BYTES

if TYPE_CHECKING:
    import torch

MAGIC = b"TBPS"
VERSION = 1
MAX_KEY_BYTES = 4096
MAX_NOTE_BYTES = 60_000
DTYPES = tuple(ELEMENT_BYTES)
_NUMBER_OF = {name: number for number, name in enumerate(DTYPES)}

_FIXED = struct.Struct("<4sBBBB16sHHIQQqQQQQdQQHI")
FIXED_BYTES = _FIXED.size


class Operation(enum.IntEnum):
    """What a message asks for; an answer carries the operation that it answers."""

    ALL_REDUCE = 1
    FOLD = 2
    SPREAD = 3
    ALL_GATHER = 4
    BROADCAST = 5
    BARRIER = 6
    INSTALL = 7
    APPLY = 8
    COUNTERS = 9
    GOODBYE = 10
    ALL_TO_ALL = 11
    MERGE = 12
    RECORDED = 13


_OPERATIONS = {int(operation): operation for operation in Operation}
ExchangeName = tuple[Operation, int, int]  # operation, stream, sequence


class Flag:
    """Bits that change what a message means; plain numbers, because every message is tested."""

    NONE: Final = 0
    PAYLOAD: Final = 1  # the elements of this slice are in the second frame
    ERROR: Final = 2  # from a server: the note says why the exchange failed
    RENEWED: Final = 4  # with FOLD: the worker will not spread the fold before this one
    REPACKED: Final = 8  # from a server, with MERGE: the mean was encoded again, not without loss
    ALL: Final = PAYLOAD | ERROR | RENEWED | REPACKED


class WireError(ValueError):
    """A frame that cannot be understood."""


class BadMagic(WireError):
    """The frame does not begin as a header does: the sender is no part of a testbed."""


class BadVersion(WireError):
    """The frame comes from a testbed with another wire format."""


class BadLength(WireError):
    """The frame is shorter or longer than its own fields say."""


class BadField(WireError):
    """A field holds a value that has no meaning."""


class BadToken(WireError):
    """The frame comes from another job."""


class Header(msgspec.Struct, frozen=True, gc=False):
    """One message, without its payload; `msgspec.structs.replace` makes others of it.

    Attributes:
        operation: what is asked or answered.
        worker: the worker that sends a request, or to which an answer goes.
        root: source of a broadcast or of a gathered part; destination (ALL_TO_ALL); the range of a
            message that was cut.
        flags: see `Flag`.
        dtype: one of `DTYPES`.
        frame_count: messages that this worker sends to this server in this exchange, where the
            server cannot know (ALL_GATHER, ALL_TO_ALL).
        stream: what numbers the exchange: a channel, or a digest of a folded key.
        sequence: number of the exchange within its stream.
        step: training step, for errors.
        offset: first element of the slice within the tensor.
        num_elements: elements of the slice.
        total_elements: elements of the whole tensor.
        learning_rate: for APPLY, of this step.
        version: for APPLY, answered: number of updates that the parameters hold.
        staleness: for APPLY, answered: clocks that the slowest worker was behind.
        key: name of the tensor.
        note: optimizer (INSTALL), merger (MERGE), counters (COUNTERS) or error text, as bytes.
    """

    operation: Operation
    worker: int
    root: int = 0
    flags: int = Flag.NONE
    dtype: str = "uint8"
    frame_count: int = 0
    stream: int = 0
    sequence: int = 0
    step: int = 0
    offset: int = 0
    num_elements: int = 0
    total_elements: int = 0
    learning_rate: float = 0.0
    version: int = 0
    staleness: int = 0
    key: str = ""
    note: bytes = b""

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload frame: the slice's, or none where no payload is carried."""
        return self.num_elements * ELEMENT_BYTES[self.dtype] if self.flags & Flag.PAYLOAD else 0

    @property
    def exchange(self) -> ExchangeName:
        """What all messages of one exchange share."""
        return (self.operation, self.stream, self.sequence)


def token_digest(token: bytes) -> bytes:
    """The 16 bytes that stand for the job's token in every header."""
    return hashlib.blake2b(token, digest_size=16, person=b"testbed-ps-token").digest()


def worker_identity(token: bytes, worker: int) -> bytes:
    """The routing identity of a worker; it cannot be guessed without the token."""
    name = worker.to_bytes(4, "little")
    digest = hashlib.blake2b(name, digest_size=15, key=token[:64], person=b"testbed-ps-name")
    # A first byte of zero is reserved by ZeroMQ.
    return b"w" + digest.digest()


def encode(header: Header, digest: bytes) -> bytes:
    """The header frame.

    Raises:
        BadField: a value does not fit its field.
    """
    key = header.key.encode("utf-8", "surrogatepass")
    if len(key) > MAX_KEY_BYTES or len(header.note) > MAX_NOTE_BYTES:
        raise BadField(
            f"key of {len(key)} and note of {len(header.note)} bytes; expected at most "
            f"{MAX_KEY_BYTES} and {MAX_NOTE_BYTES}; give the tensor a shorter key"
        )
    try:
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            header.operation,
            _NUMBER_OF[header.dtype],
            header.flags,
            digest,
            header.worker,
            header.root,
            header.frame_count,
            header.stream,
            header.sequence,
            header.step,
            header.offset,
            header.num_elements,
            header.total_elements,
            header.payload_bytes,
            header.learning_rate,
            header.version,
            header.staleness,
            len(key),
            len(header.note),
        )
    except (struct.error, KeyError) as error:
        raise BadField(f"{header} cannot be written: {error}") from error
    return fixed + key + header.note


def decode(frame: bytes | memoryview, digest: bytes) -> Header:
    """The header of a frame that passed every check.

    Raises:
        BadMagic: no header of ours.
        BadVersion: another wire format.
        BadToken: another job.
        BadLength: truncated, or longer than it says.
        BadField: an unknown operation or dtype, a slice beyond its tensor, a key that is no text.
    """
    data = bytes(frame)
    fields, key_bytes, note_bytes = _unpack(data, digest)
    operation, dtype, flags, worker, root, frame_count, stream, sequence, step = fields[:9]
    offset, num_elements, total_elements, payload_bytes = fields[9:13]
    learning_rate, version, staleness = fields[13:]
    _check_fields(operation, dtype, flags, offset, num_elements, total_elements)
    note_start = len(data) - note_bytes
    try:
        key = data[note_start - key_bytes : note_start].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise BadField(f"key is no UTF-8 text: {error}") from error
    header = Header(
        operation=_OPERATIONS[operation],
        worker=worker,
        root=root,
        flags=flags,
        dtype=DTYPES[dtype],
        frame_count=frame_count,
        stream=stream,
        sequence=sequence,
        step=step,
        offset=offset,
        num_elements=num_elements,
        total_elements=total_elements,
        learning_rate=learning_rate,
        version=version,
        staleness=staleness,
        key=key,
        note=data[note_start:],
    )
    if header.payload_bytes != payload_bytes:
        raise BadLength(
            f"payload is said to have {payload_bytes} bytes; expected {header.payload_bytes}"
        )
    return header


def _unpack(data: bytes, digest: bytes) -> tuple[tuple[Any, ...], int, int]:
    """The fields from operation to staleness without the token, and the bytes of key and note."""
    if data[:4] != MAGIC:
        raise BadMagic(f"frame begins with {data[:4]!r}; expected {MAGIC!r}")
    if len(data) < FIXED_BYTES:
        raise BadLength(f"frame has {len(data)} bytes; expected at least {FIXED_BYTES}")
    if data[4] != VERSION:
        raise BadVersion(f"wire version is {data[4]}; expected {VERSION}; install one version")
    _, _, *kind, token, worker = (fields := _FIXED.unpack_from(data))[:7]
    if token != digest:
        raise BadToken("frame carries the token of another job")
    key_bytes, note_bytes = fields[-2:]
    expected = FIXED_BYTES + key_bytes + note_bytes
    if len(data) != expected:
        raise BadLength(
            f"frame has {len(data)} bytes; expected {expected} from its key of {key_bytes} and "
            f"its note of {note_bytes} bytes"
        )
    return (*kind, worker, *fields[7:-2]), key_bytes, note_bytes


def check_payload(header: Header, num_bytes: int) -> None:
    """Refuse a payload frame of another length than its header says.

    Raises:
        BadLength: the lengths differ.
    """
    if num_bytes != header.payload_bytes:
        raise BadLength(f"payload has {num_bytes} bytes; expected {header.payload_bytes}")


def _check_fields(
    operation: int, dtype: int, flags: int, offset: int, num_elements: int, total: int
) -> None:
    if operation not in _OPERATIONS:
        raise BadField(f"operation is {operation}; expected 1 to {max(Operation)}")
    if dtype >= len(DTYPES):
        raise BadField(f"dtype is {dtype}; expected 0 to {len(DTYPES) - 1}")
    if flags & ~Flag.ALL:
        raise BadField(f"flags are {flags:#x}; expected bits of {Flag.ALL:#x}")
    if offset + num_elements > total:
        raise BadField(
            f"slice ends at element {offset + num_elements}; expected at most {total}, "
            "the elements of its tensor"
        )


# A whole message, and what every one of them must pass.


@dataclass(frozen=True)
class Packet:
    """One message of a worker to a server, or of a server to a worker (`header.worker`)."""

    header: Header
    payload: torch.Tensor | None = None


class Refused(ValueError):
    """A message that is well formed but does not belong here; it changes nothing."""


class Mismatch(Exception):
    """The workers do not ask for the same exchange."""


def answer(header: Header, worker: int, payload: torch.Tensor | None = None) -> Packet:
    """The answer to a worker about the slice that a message named."""
    flags = Flag.NONE if payload is None else Flag.PAYLOAD
    return Packet(replace(header, worker=worker, flags=flags, note=b""), payload)


SAME_SLICE = ("key", "step", "dtype", "total_elements", "num_elements", "root")


def check_same(first: Header, other: Header, names: tuple[str, ...] = SAME_SLICE) -> None:
    """Whether two workers mean the same slice of the same tensor.

    Raises:
        Mismatch: one of the named fields differs.
    """
    for name in names:
        ours, theirs = getattr(first, name), getattr(other, name)
        if ours != theirs:
            raise Mismatch(
                f"{other.operation.name} of {other.key!r} in step {other.step} (number "
                f"{other.sequence}): {name} is {ours!r} on rank {first.worker} and {theirs!r} on "
                f"rank {other.worker}; all ranks must submit the same exchanges in the same order"
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
