"""Frames that go out are the frames that come in, whatever their number and size."""

import pytest
import torch
import zmq

from testbed.backends.checks import DTYPES
from testbed.backends.zmq_ps.frames import (
    bytes_of,
    has_message,
    receive_frames,
    send_frames,
)


@pytest.fixture
def ends():
    with zmq.Context() as context:
        one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        one.bind("inproc://frames")
        other.connect("inproc://frames")
        yield one, other
        one.close(0)
        other.close(0)


@pytest.mark.parametrize("payload", [None, b"", b"x" * 10, b"y" * 200_000])
@pytest.mark.parametrize("headers", [(b"head",), (b"who", b"")])
def test_a_message_arrives_as_it_was_sent(ends, headers, payload):
    one, other = ends
    send_frames(one, headers, None if payload is None else memoryview(payload))
    assert has_message(other)
    came, others = receive_frames(other, len(headers))
    assert tuple(came) == headers
    assert [bytes(frame) for frame in others] == ([] if payload is None else [payload])
    assert not has_message(other)


def test_more_frames_than_expected_all_come_and_fewer_do_not_wait(ends):
    one, other = ends
    one.send_multipart([b"a", b"b", b"c", b"d"])
    headers, others = receive_frames(other, 2)
    assert (headers, [bytes(f) for f in others]) == ([b"a", b"b"], [b"c", b"d"])
    one.send(b"alone")
    assert receive_frames(other, 2) == ([b"alone"], [])
    with pytest.raises(zmq.Again):
        receive_frames(other, 2)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_bytes_are_the_memory_of_the_tensor(dtype):
    tensor = torch.arange(6).to(dtype).reshape(2, 3)
    seen = bytes_of(tensor)
    assert bytes(seen) == bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    seen[:] = 0
    assert not tensor.any()
