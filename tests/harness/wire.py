"""Pickled objects over a local stream socket, each receipt under a deadline."""

from __future__ import annotations

import pickle
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct("<Q")


def send_object(connection: socket.socket, value: Any) -> None:
    """Send one object; blocks until it is written."""
    data = pickle.dumps(value)
    connection.settimeout(60)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_object(connection: socket.socket, end_s: float | None) -> Any:
    """The next object.

    Args:
        connection: a connected stream socket.
        end_s: `time.monotonic()` after which nobody waits any more; None = wait for ever.

    Raises:
        EOFError: the other side has gone.
        TimeoutError: nothing complete came in time.
    """
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, end_s))
    return pickle.loads(_receive(connection, length, end_s))


def _receive(connection: socket.socket, num_bytes: int, end_s: float | None) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        if end_s is None:
            connection.settimeout(None)
        else:
            connection.settimeout(max(0.001, end_s - time.monotonic()))
        try:
            piece = connection.recv(min(1 << 20, num_bytes - len(data)))
        except ConnectionResetError:
            piece = b""
        if not piece:
            raise EOFError("the other side closed the connection")
        data += piece
    return bytes(data)
