"""Length-prefixed msgpack frames on a TCP connection: the wire of the control plane."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Literal

import msgspec

from testbed.base.errors import TestbedError

_LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 64 << 20
OTHERS_ALONE = 1

Kind = Literal[
    "hello",
    "welcome",
    "refuse",
    "value",
    "values",
    "announce",
    "beat",
    "failure",
    "loss",
    "bye",
    "time",
]


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """One message; which fields mean something depends on the kind.

    Attributes:
        kind: of message.
        member: its sender (for `loss`: the lost member).
        name: all-gather name, topic, or words.
        turn: number of the all-gather under this name; `OTHERS_ALONE` for an announcement that does
            not come back to its sender.
        members: how many take part in it, or receive an announcement.
        values: of an all-gather, an announcement, or the states of all members; of `time` what the
            hub's clock shows.
    """

    kind: Kind
    member: int = 0
    name: str = ""
    turn: int = 0
    members: int = 0
    values: tuple[bytes, ...] = ()


class BadFrame(TestbedError):
    """Bytes on the control port that are no frame of ours."""


def encode(frame: Frame) -> bytes:
    """The frame with its length in front.

    Raises:
        BadFrame: it is longer than a reader takes.
    """
    body = msgspec.msgpack.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(
            f"{frame.kind} {frame.name!r} has {len(body)} bytes; at most {MAX_FRAME_BYTES} go in "
            "one frame"
        )
    return _LENGTH.pack(len(body)) + body


class Torn(TimeoutError):
    """A part of a frame was sent: it would swallow all that follow it on this connection."""


def send_whole(connection: socket.socket, data: bytes, patience_s: float) -> None:
    """Send all bytes, however often the connection's own timeout passes meanwhile.

    Raises:
        Torn: a part was sent, and the other side took nothing more for `patience_s`.
        TimeoutError: it took nothing at all for so long.
        OSError: it is gone.
    """
    left, moved_s = memoryview(data), time.monotonic()
    while left:
        try:
            left = left[connection.send(left) :]
            moved_s = time.monotonic()
        except TimeoutError:
            if time.monotonic() - moved_s > patience_s:
                if len(left) < len(data):
                    raise Torn from None
                raise


def shut(connection: socket.socket) -> None:
    """End both directions; whoever reads from it, here or there, hears of it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def wanted(self) -> int:
        """How many bytes of the next frame are missing, as far as that is known yet."""
        arrived = len(self._buffer)
        if arrived < _LENGTH.size:
            return _LENGTH.size - arrived
        (length,) = _LENGTH.unpack_from(self._buffer)
        return int(_LENGTH.size + length - arrived)

    def feed(self, data: bytes) -> list[Frame]:
        """All frames that are complete with these bytes.

        Raises:
            BadFrame: too long, or no frame of ours.
        """
        self._buffer += data
        frames: list[Frame] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            if len(self._buffer) < _LENGTH.size + length:
                break
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            try:
                frames.append(msgspec.msgpack.decode(body, type=Frame))
            except msgspec.DecodeError as error:
                raise BadFrame(f"a frame that is not ours ({error})") from error
        return frames


def read_frame(connection: socket.socket) -> Frame | None:
    """The next frame and no byte after it; None when the other side is gone.

    Raises:
        BadFrame: what arrives is no frame of ours.
        TimeoutError: the connection's own timeout has passed.
    """
    reader = FrameReader()
    while data := connection.recv(reader.wanted):
        if frames := reader.feed(data):
            return frames[0]
    return None


def read_some(connection: socket.socket) -> bytes:
    """What has arrived; empty when the other side is gone, for whatever reason."""
    try:
        return connection.recv(1 << 16)
    except (ConnectionError, TimeoutError):
        return b""
