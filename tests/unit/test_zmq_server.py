"""A real server on a real socket: it refuses what it does not understand and goes on serving."""

import threading
from dataclasses import replace

import msgspec
import pytest
import torch
import zmq

from testbed.backends.zmq_ps.client import Waker
from testbed.backends.zmq_ps.frames import tensor_of
from testbed.backends.zmq_ps.server_process import Counters, Refusals, Server, ServerSettings
from testbed.backends.zmq_ps.wire import (
    Flag,
    Header,
    Operation,
    decode,
    encode,
    token_digest,
    worker_identity,
)

TOKEN = b"the job's secret"
DIGEST = token_digest(TOKEN)
SLICE_BYTES = 64 * 1024
TIMEOUT_MS = 20_000


class Context(zmq.Context):
    """A context that knows the clients' sockets, so that a test need not close each."""

    opened: list


@pytest.fixture
def context():
    with Context() as context:
        context.opened = []
        yield context
        for socket in context.opened:
            socket.close(linger=0)


@pytest.fixture
def server(context):
    """A server for two workers, running in a thread."""
    server = Server(ServerSettings(0, "127.0.0.1", TOKEN, 2, 0, SLICE_BYTES), context)
    stop = Waker()
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(server.run(stop.fd)))
    thread.start()
    yield server
    stop.wake()
    thread.join(20)
    assert not thread.is_alive()
    assert outcome, "the server's loop raised"
    server.close()
    stop.close()


def connect(context, server, identity):
    socket = context.socket(zmq.DEALER)
    context.opened.append(socket)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    socket.connect(server.endpoint)
    return socket


def worker(context, server, rank):
    return connect(context, server, worker_identity(TOKEN, rank))


def sum_frames(rank, sequence=0, values=(1.0, 2.0)):
    term = torch.tensor(values)
    header = Header(
        Operation.ALL_REDUCE,
        rank,
        flags=Flag.PAYLOAD,
        dtype="float32",
        sequence=sequence,
        num_elements=len(values),
        total_elements=len(values),
        key="w",
    )
    return [encode(header, DIGEST), term.numpy().tobytes()]


def counters(socket):
    socket.send(encode(Header(Operation.COUNTERS, 0), DIGEST))
    return msgspec.json.decode(decode(socket.recv(), DIGEST).note, type=Counters)


def serves_a_sum(first, second, sequence):
    first.send_multipart(sum_frames(0, sequence))
    second.send_multipart(sum_frames(1, sequence))
    for socket in (first, second):
        header, payload = socket.recv_multipart()
        assert decode(header, DIGEST).sequence == sequence
        assert tensor_of(memoryview(bytearray(payload)), "float32").tolist() == [2.0, 4.0]


def _garbage():
    good_header, good_payload = sum_frames(0, 99)
    broken = bytearray(good_header)
    broken[5] = 200
    return [
        ([b""], "BadMagic"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "BadMagic"),
        ([bytes(range(256))], "BadMagic"),
        ([good_header[:50]], "BadLength"),
        ([good_header + b"x", good_payload], "BadLength"),
        ([good_header, good_payload[:-1]], "BadLength"),
        ([good_header, b""], "BadLength"),
        ([good_header[:4] + b"\x09" + good_header[5:], good_payload], "BadVersion"),
        ([bytes(broken), good_payload], "BadField"),
        ([good_header], "Refused"),
        ([good_header, good_payload, b"more"], "Refused"),
        ([good_header, good_payload, b"more", b"still more"], "Refused"),
        (sum_frames(1, 99), "Refused"),  # rank 0's socket speaks for rank 1
        ([encode(Header(Operation.ALL_REDUCE, 0), token_digest(b"other"))], "BadToken"),
        ([encode(Header(Operation.ALL_REDUCE, 7), DIGEST)], "Refused"),
        ([encode(Header(Operation.ALL_REDUCE, 0), DIGEST)], "Refused"),
    ]


@pytest.mark.parametrize(("frames", "kind"), _garbage())
def test_garbage_is_refused_counted_logged_and_survived(context, server, capfd, frames, kind):
    first, second = worker(context, server, 0), worker(context, server, 1)
    serves_a_sum(first, second, 0)
    before = counters(first)
    first.send_multipart(frames)
    serves_a_sum(first, second, 1)
    after = counters(first)
    assert after.refused == {kind: 1}
    assert after.received_bytes[0] - before.received_bytes[0] == 8
    assert f"parameter server 0: refused {kind} (1 so far)" in capfd.readouterr().err


def test_a_stranger_is_refused_even_with_frames_that_it_overheard(context, server):
    first, second = worker(context, server, 0), worker(context, server, 1)
    stranger = connect(context, server, b"stranger")
    stranger.send_multipart(sum_frames(0, 0))
    stranger.send(encode(Header(Operation.COUNTERS, 0), DIGEST))
    serves_a_sum(first, second, 0)
    # Messages of several senders have no order among them: ask until both were seen.
    while sum(counters(first).refused.values()) < 2:
        pass
    assert counters(first).refused == {"Refused": 2}
    assert stranger.poll(0) == 0
    serves_a_sum(first, second, 1)


def test_a_frame_beyond_the_slice_size_ends_its_connection_only(context, server):
    first, second = worker(context, server, 0), worker(context, server, 1)
    flood = connect(context, server, b"flood")
    monitor = flood.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    flood.send(bytes(1 << 20))
    assert monitor.poll(TIMEOUT_MS), "the server kept the connection"
    flood.disable_monitor()
    monitor.close()
    serves_a_sum(first, second, 0)
    assert counters(first).refused == {}


def test_the_server_ends_once_all_workers_have_left(context):
    server = Server(ServerSettings(0, "127.0.0.1", TOKEN, 2, 0, SLICE_BYTES), context)
    stop = Waker()
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(server.run(stop.fd)))
    thread.start()
    for rank in range(2):
        socket = worker(context, server, rank)
        socket.send(encode(Header(Operation.GOODBYE, rank), DIGEST))
        assert decode(socket.recv(), DIGEST).operation is Operation.GOODBYE
    thread.join(20)
    assert outcome == [True]
    server.close()
    stop.close()


def test_counters_keep_workers_apart(context, server):
    first, second = worker(context, server, 0), worker(context, server, 1)
    serves_a_sum(first, second, 0)
    told = counters(first)
    assert told.received_bytes == [8, 8]
    assert told.sent_bytes == [8, 8]
    owner = replace(told.traffic(0), header_bytes=0)
    assert (owner.sent_bytes, owner.received_bytes, owner.num_messages) == (8, 8, 2)


def test_refusals_are_logged_once_a_second_and_counted_always(capsys):
    now_s = [100.0]
    refusals = Refusals("server", clock=lambda: now_s[0])
    for _ in range(5):
        refusals.add("BadMagic", "noise")
    now_s[0] += 1.0
    refusals.add("BadMagic", "noise")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "server: refused BadMagic (1 so far): noise",
        "server: refused BadMagic (6 so far): noise",
    ]
    assert refusals.counts == {"BadMagic": 6}
