"""Frames in and out of a socket, with as little Python per frame as can be.

`send_multipart` and `recv_multipart` join enumeration flags for every frame and make a `Frame`
also of a header, and asking an empty socket for a message raises an error: too much for messages
of 50 KB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from collections.abc import Sequence

_MORE = int(zmq.SNDMORE)
_AT_ONCE = int(zmq.NOBLOCK)
_HAS_INPUT = int(zmq.POLLIN)


def send_frames(
    socket: zmq.Socket[bytes], headers: Sequence[bytes], payload: memoryview | None
) -> None:
    """One message of short frames and, unless it is None, a payload that is not copied if long.

    Raises:
        zmq.ZMQError: as `send` does, with the first frame.
    """
    for header in headers[:-1]:
        socket.send(header, _MORE)
    if payload is None:
        socket.send(headers[-1])
        return
    socket.send(headers[-1], _MORE)
    socket.send(payload, copy=False)


def receive_frames(
    socket: zmq.Socket[bytes], num_headers: int
) -> tuple[list[bytes], list[memoryview]]:
    """The next message: its first `num_headers` frames, or fewer if it has no more, and the others.

    Raises:
        zmq.Again: there is none.
    """
    headers = [socket.recv(_AT_ONCE)]
    others: list[memoryview] = []
    while socket.getsockopt(zmq.RCVMORE):
        if len(headers) < num_headers:
            headers.append(socket.recv(_AT_ONCE))
        else:
            others.append(socket.recv(_AT_ONCE, copy=False).buffer)
    return headers, others


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits; asking costs less than the error of receiving none."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _HAS_INPUT)
