"""Frames in and out of a socket, with as little Python per frame as can be.

`send_multipart` and `recv_multipart` join enumeration flags for every frame and make a `Frame`
also of a header, and asking an empty socket for a message raises an error: too much for messages
of 50 KB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import zmq

from testbed.backends.checks import DTYPES

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


# Tensors as bytes and bytes as tensors, without copies.

_KNOWN_TO_NUMPY = frozenset(DTYPES.values()) - {torch.bfloat16}

SHARED_BATCH_BYTES = 16 * 1024
"""ZeroMQ hands out smaller messages as pieces of one receive buffer, with any alignment."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor, of any dtype; writing there writes the tensor."""
    plain = tensor.detach()
    if plain.dtype in _KNOWN_TO_NUMPY:
        known: Bytes = plain.numpy().reshape(-1).view(np.uint8)  # half the time of what is below
        return known
    return plain.reshape(-1).view(torch.uint8).numpy()


def tensor_of(buffer: memoryview, dtype: str) -> torch.Tensor:
    """A flat tensor over received bytes, which it keeps alive; short ones are copied.

    Args:
        buffer: writable bytes, a whole number of elements.
        dtype: its name.
    """
    if buffer.nbytes == 0:
        return torch.empty(0, dtype=DTYPES[dtype])
    owner = bytearray(buffer) if buffer.nbytes < SHARED_BATCH_BYTES else buffer
    return torch.frombuffer(owner, dtype=DTYPES[dtype])


def copy_in(target: Bytes, first_byte: int, buffer: memoryview) -> None:
    """Write received bytes to their place; numpy lets other threads run meanwhile."""
    if buffer.nbytes:
        source = np.frombuffer(buffer, dtype=np.uint8)
        np.copyto(target[first_byte : first_byte + buffer.nbytes], source)
