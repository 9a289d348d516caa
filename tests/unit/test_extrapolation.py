"""Costs at other numbers of workers, against bytes and rounds counted one by one."""

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.base.errors import UnknownName, UsageError
from testbed.base.link import Link, Piece
from testbed.base.types import AT_ONCE_BYTES
from testbed.prediction.algorithms import ALGORITHMS, Ring, Server, algorithm_of, parse_algorithm
from testbed.prediction.extrapolate import Node, at_bandwidth, extrapolate, hold_out, slowed
from tests.harness.traces import SLOWDOWN, TRACE_A

TEN_GBIT = Link(
    backend="nccl", num_workers=16, latency_s=9.08e-4, seconds_per_byte=7.40e-10
)  # Shi, Chu and Li, 2021, IEEE TPDS: 16 V100, 4 per node
PIECEWISE = Link(
    backend="x",
    num_workers=4,
    latency_s=3.0,
    seconds_per_byte=2.0,
    concurrency_slowdown=SLOWDOWN,
    pieces=(
        Piece(max_bytes=100.0, latency_s=1.0, seconds_per_byte=4.0),
        Piece(latency_s=5.0, seconds_per_byte=1.0),
    ),
)
counts = st.integers(2, 64)


def ring_bytes(n):
    """Parts of 1 / n that each rank sends while folding and while spreading."""
    sent = [0.0] * n
    for _ in range(2):
        for _ in range(n - 1):
            for rank in range(n):
                sent[rank] += 1 / n
    return max(sent)


def halving_bytes(n):
    sent, part, rounds = 0.0, 1.0, 0
    while 2**rounds < n:
        part /= 2
        rounds += 1
        sent += 2 * part
    return sent, 2 * rounds


def server_bytes(n, num_servers, colocated):
    """Most bytes that leave or reach one interface while pushing and while pulling."""
    machines = n if colocated else n + num_servers
    out, into = [0.0] * machines, [0.0] * machines
    for worker in range(n):
        for server in range(num_servers):
            place = server if colocated else n + server
            if place != worker:
                out[worker] += 1 / num_servers
                into[place] += 1 / num_servers
    push = max(*out, *into)
    both = max(a + b for a, b in zip(out, into, strict=True))  # pull is push turned round
    return 2 * push, both


@given(counts)
def test_ring_counts(n):
    assert Ring().transfers(n) == pytest.approx(ring_bytes(n))
    assert Ring().startups(n) == 2 * (n - 1)


@pytest.mark.parametrize("n", [2, 4, 8, 64, 1024])
def test_halving_doubling_counts(n):
    found = parse_algorithm("halving-doubling")
    assert (found.transfers(n), found.startups(n)) == halving_bytes(n)


def test_extra_ranks_fold_in_before_and_out_after():
    for name in ("halving-doubling", "recursive-doubling"):
        found = parse_algorithm(name)
        assert found.startups(11) == found.startups(8) + 2
        assert found.transfers(11) == found.transfers(8) + 2


@pytest.mark.parametrize("n", [2, 8, 32])
def test_trees(n):
    assert parse_algorithm("tree").transfers(n) == (1 if n == 2 else 2)
    assert parse_algorithm("binomial").transfers(n) == 2 * log2(n)
    assert parse_algorithm("tree").startups(n) == 2 * log2(n)
    assert parse_algorithm("recursive-doubling").transfers(n) == log2(n)


@given(counts, st.integers(1, 64), st.booleans())
def test_server_counts(n, num_servers, colocated):
    num_servers = min(num_servers, n) if colocated else num_servers
    placement = "colocated" if colocated else "dedicated"
    one_after_another, overlapped = server_bytes(n, num_servers, colocated)
    plain = Server(num_servers, placement, overlap=False)
    assert plain.transfers(n) == pytest.approx(one_after_another)
    assert Server(num_servers, placement).transfers(n) == pytest.approx(overlapped)


def test_servers_of_eight_workers():
    def all_counts(placement, overlap):
        return [Server(s, placement, overlap).transfers(8) for s in (1, 2, 4, 8)]

    assert all_counts("dedicated", False) == [16, 8, 4, 2]
    assert all_counts("dedicated", True) == [8, 4, 2, 1]
    assert all_counts("colocated", False) == [14, 7, 3.5, 1.75]
    assert all_counts("colocated", True) == [7, 4, 2.5, 1.75]
    assert Server().transfers(8) == Ring().transfers(8)


def test_messages_cost_endpoints_time():
    assert Server(endpoint=0.5).startups(8) == 2 + 8
    assert Server(servers=16, placement="dedicated", endpoint=0.5).startups(8) == 2 + 16


def test_published_fit_at_half_as_many_workers():
    assert TEN_GBIT.latency_s / Ring().startups(16) == pytest.approx(3.03e-5, rel=2e-3)
    assert TEN_GBIT.seconds_per_byte / Ring().transfers(16) == pytest.approx(3.95e-10, rel=2e-3)
    measured = Link(backend="nccl", num_workers=8, latency_s=5.23e-4, seconds_per_byte=8.57e-10)
    (found,) = hold_out(TEN_GBIT, Ring(), [measured])
    assert found.predicted.latency_s == pytest.approx(4.24e-4, rel=2e-3)
    assert found.predicted.seconds_per_byte == pytest.approx(6.91e-10, rel=2e-3)
    assert found.latency_error == pytest.approx(-0.19, abs=5e-3)
    assert found.seconds_per_byte_error == pytest.approx(-0.19, abs=5e-3)


@given(st.sampled_from(sorted(ALGORITHMS)), st.sampled_from([2, 3, 4, 16, 100]))
def test_there_and_back_again(name, n):
    algorithm = parse_algorithm(name)
    back = extrapolate(extrapolate(PIECEWISE, algorithm, n), algorithm, 4)
    for size in (50, 5000):
        assert back.time_s(size) == pytest.approx(PIECEWISE.time_s(size))
    assert back.slowdown(3) == PIECEWISE.slowdown(3)


def test_pieces_scale_alike():
    found = extrapolate(PIECEWISE, Ring(), 8)
    startups, transfers = 14 / 6, (14 / 8) / (6 / 4)
    assert found.time_s(50) == pytest.approx(1.0 * startups + 4.0 * transfers * 50)
    assert found.time_s(500) == pytest.approx(5.0 * startups + 1.0 * transfers * 500)


def test_one_worker_is_free():
    assert extrapolate(PIECEWISE, Ring(), 1).time_s(1e6) == 0


def test_nodes_send_what_their_ranks_sum():
    inside = Node(Link(backend="x", num_workers=4, latency_s=0.0, seconds_per_byte=0.0))
    flat = Link(backend="x", num_workers=8, latency_s=2.0, seconds_per_byte=1.0)  # two nodes
    found = extrapolate(flat, Ring(), 16, inside)
    # One interface's time per byte is 1 for two nodes; four nodes put 1.5 M on it, not 1.875 M.
    assert found.seconds_per_byte == pytest.approx(1.5)
    assert found.latency_s == pytest.approx(2.0 * 3)


def test_inside_a_node_the_nodes_own_link_counts():
    node = Node(Link(backend="x", num_workers=4, latency_s=6e-6, seconds_per_byte=1.5e-11))
    inside = extrapolate(TEN_GBIT, Ring(), 2, node)
    assert (inside.latency_s, inside.seconds_per_byte) == pytest.approx((2e-6, 1e-11))
    across = extrapolate(TEN_GBIT, Ring(), 16, node)
    assert across.latency_s == pytest.approx(TEN_GBIT.latency_s)
    assert across.seconds_per_byte == pytest.approx(TEN_GBIT.seconds_per_byte)
    assert across.num_workers == 16


def test_a_slow_interface_stretches_transfers_alone():
    found = at_bandwidth(PIECEWISE, 0.5)
    assert found.time_s(50) == pytest.approx(1.0 + 2 * 4.0 * 50)
    assert found.slowdown(2) == PIECEWISE.slowdown(2)


@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_memory_inside_a_node_is_no_faster_for_another_network(factor):
    inside = Link(backend="x", num_workers=4, latency_s=6e-6, seconds_per_byte=2e-10)
    found = at_bandwidth(TEN_GBIT, factor, Node(inside))
    network = TEN_GBIT.seconds_per_byte - 2e-10
    assert found.seconds_per_byte == pytest.approx(2e-10 + network / factor)
    assert found.latency_s == TEN_GBIT.latency_s
    within = extrapolate(TEN_GBIT, Ring(), 2, Node(inside))
    assert at_bandwidth(within, factor, Node(inside)) == within


def test_all_wait_for_the_slowest_worker():
    found = slowed(TRACE_A, 1.5)
    assert found.forward_s == pytest.approx(1.5 * TRACE_A.forward_s)
    assert found.ready_s() == pytest.approx([1.5 * r for r in TRACE_A.ready_s()])
    assert found.num_bytes == TRACE_A.num_bytes


@pytest.mark.parametrize(
    ("backend", "algorithm"),
    [
        ("zmq-ps:consistency=ssp:4", "server"),
        ("zmq-ps:servers=colocated", "server"),
        ("zmq-ps:servers=colocated:2", "server:servers=2"),
        ("mpi-ring", f"ring:at_once_bytes={AT_ONCE_BYTES}"),
    ],
)
def test_the_backend_tells_the_algorithm(backend, algorithm):
    assert algorithm_of(backend) == algorithm


@pytest.mark.parametrize(
    ("backend", "why"), [("x", "is not known here"), ("loopback", "declares no algorithm")]
)
def test_no_backend_is_taken_for_a_ring(backend, why):
    with pytest.raises(UsageError, match=f"'{backend}' {why}.*one of ring"):
        algorithm_of(backend)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: parse_algorithm("rign"), UnknownName, "did you mean 'ring'"),
        (lambda: parse_algorithm("server:where=here"), UsageError, "known options: endpoint"),
        (lambda: Server(servers=-1), UsageError, "servers is -1"),
        (lambda: Ring(at_once_bytes=-1), UsageError, "at_once_bytes is -1"),
        (lambda: extrapolate(PIECEWISE, Ring(), 0), UsageError, "expected 1 or more"),
        (
            lambda: extrapolate(extrapolate(PIECEWISE, Ring(), 1), Ring(), 2),
            UsageError,
            "measured with 1 worker;",
        ),
        (lambda: at_bandwidth(PIECEWISE, 0), UsageError, "expected above 0"),
        (lambda: slowed(TRACE_A, 0.5), UsageError, "expected 1 or more"),
        (
            lambda: extrapolate(PIECEWISE, Ring(), 8, Node(PIECEWISE)),
            UsageError,
            "all in one node of 4 ranks",
        ),
        (
            lambda: extrapolate(TEN_GBIT, Ring(), 32, Node(PIECEWISE)),
            UsageError,
            "costs more than one across nodes",
        ),
    ],
)
def test_what_cannot_be_is_named(make, error, words):
    with pytest.raises(error, match=words):
        make()
