"""Whole jobs over real sockets; ranks and dedicated servers are threads, others processes."""

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from testbed.backends.protocol import Group
from testbed.backends.zmq_ps import ZMQ_PS, ZmqPsOptions, busiest_link_bytes
from testbed.base.errors import DeadlineExceeded, Disagreement, RankLost, UsageError
from testbed.base.types import Op, Request
from testbed.control.inproc import InprocHub

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
)


class Job:
    """All ranks of one job in this process."""

    def __init__(self, size, options, **group):
        num_servers = options.num_dedicated
        hub = InprocHub(size + num_servers)
        self.pool = ThreadPoolExecutor(size + num_servers)
        groups = [
            Group(
                rank,
                size,
                hub.member(rank),
                num_servers=num_servers,
                token=b"secret",
                **{"deadline_s": 30.0, **group},
            )
            for rank in range(size + num_servers)
        ]
        self.controls = [g.control for g in groups]
        self.servers = [
            self.pool.submit(ZMQ_PS.facts(options).serve, g, options) for g in groups[size:]
        ]
        opening = [self.pool.submit(ZMQ_PS.build, g, options) for g in groups[:size]]
        self.backends = [future.result(100) for future in opening]

    def each(self, act):
        """What `act(rank, backend)` returns on each rank, run at the same time."""
        futures = [self.pool.submit(act, rank, b) for rank, b in enumerate(self.backends)]
        return [future.result(60) for future in futures]

    def request(self, *requests):
        """Submit one request per rank and wait for all."""
        return self.each(lambda rank, backend: backend.submit(requests[rank]).wait())

    def close(self):
        self.each(lambda rank, backend: backend.close())
        self.pool.shutdown()


@contextlib.contextmanager
def job(size, options, **group):
    """A job that is closed at the end; its dedicated servers must then have ended well."""
    running = Job(size, options, **group)
    try:
        yield running
    finally:
        running.close()
    for server in running.servers:
        server.result(0)


def terms(size, num_elements, dtype):
    generator = torch.Generator().manual_seed(num_elements)
    shape = () if num_elements is None else (num_elements,)
    return [torch.randint(0, 50, shape, generator=generator).to(dtype) for _ in range(size)]


def every_verb(running, dtype, num_elements):
    size = len(running.backends)
    start = terms(size, num_elements, dtype)
    total = sum(start[1:], start=start[0])

    tensors = [t.clone() for t in start]
    done = running.request(*(Request(Op.ALL_REDUCE, t, "w") for t in tensors))
    assert all(torch.equal(t, total) for t in tensors)
    assert all(c.tensor is t for c, t in zip(done, tensors, strict=True))

    tensors = [t.clone() for t in start]
    running.request(*(Request(Op.FOLD, t, "w") for t in tensors))
    running.request(*(Request(Op.SPREAD, t, "w") for t in tensors))
    assert all(torch.equal(t, total) for t in tensors)

    tensors = [t.clone() for t in start]
    root = size - 1
    running.request(*(Request(Op.BROADCAST, t, "w", root=root) for t in tensors))
    assert all(torch.equal(t, start[root]) for t in tensors)

    parts = [torch.full((rank * num_elements,), rank + 1).to(dtype) for rank in range(size)]
    done = running.request(*(Request(Op.ALL_GATHER, part, "w") for part in parts))
    for combined in done:
        assert all(torch.equal(a, b) for a, b in zip(combined.parts, parts, strict=True))
        assert len(combined.parts) == size

    assert [c.tensor for c in running.request(*[Request(Op.BARRIER)] * size)] == [None] * size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_verb_and_dtype_over_dedicated_servers(size):
    with job(size, ZmqPsOptions(servers="dedicated:2", slice_kib=8)) as running:
        for dtype in DTYPES:
            for num_elements in (0, 1, 20_000):
                every_verb(running, dtype, num_elements)


@pytest.mark.parametrize(("size", "servers"), [(1, "colocated"), (2, "colocated:1")])
def test_every_verb_over_colocated_servers(size, servers):
    with job(size, ZmqPsOptions(servers=servers, slice_kib=8)) as running:
        for dtype in (torch.float32, torch.bfloat16):
            every_verb(running, dtype, 30_000)


def test_tensors_of_any_shape_are_summed_in_place():
    with job(2, ZmqPsOptions(servers="dedicated:1")) as running:
        for shape in ((), (3, 4, 5), (0, 7)):
            tensors = [torch.full(shape, rank + 1.0) for rank in range(2)]
            running.request(*(Request(Op.ALL_REDUCE, t, "w") for t in tensors))
            assert all(torch.equal(t, torch.full(shape, 3.0)) for t in tensors)


@pytest.mark.parametrize("order", ["fifo", "priority"])
def test_channels_run_side_by_side_and_every_request_arrives(order):
    with job(3, ZmqPsOptions(servers="dedicated:2"), num_channels=2, order=order) as running:

        def many(rank, backend):
            tensors = [torch.full((100 + i,), float(rank + i)) for i in range(30)]
            works = [
                backend.submit(Request(Op.ALL_REDUCE, t, f"t{i}", channel=i % 2, priority=-i))
                for i, t in enumerate(tensors)
            ]
            for work in works:
                work.wait()
            return tensors

        for tensors in running.each(many):
            assert all(torch.equal(t, torch.full_like(t, 3 + 3 * i)) for i, t in enumerate(tensors))


def test_folds_of_two_tensors_may_be_spread_later_in_any_order():
    with job(2, ZmqPsOptions(servers="dedicated:1")) as running:

        def fold_then_spread(rank, backend):
            first, second = torch.full((5,), rank + 1.0), torch.full((6,), 10.0)
            for key, tensor in (("a", first), ("b", second)):
                backend.submit(Request(Op.FOLD, tensor, key, step=4)).wait()
            for key, tensor in (("b", second), ("a", first)):
                backend.submit(Request(Op.SPREAD, tensor, key, step=4)).wait()
            with pytest.raises(UsageError, match="no fold to bring back"):
                backend.submit(Request(Op.SPREAD, first, "a", step=4))
            return first, second

        for first, second in running.each(fold_then_spread):
            assert first.tolist() == [3.0] * 5
            assert second.tolist() == [20.0] * 6


def steady_steps(options, size, num_bytes):
    """Traffic of each rank, and of its request, for one sum of `num_bytes` bytes."""
    with job(size, options) as running:
        tensors = [torch.ones(num_bytes // 4) for _ in range(size)]
        done = running.request(*(Request(Op.ALL_REDUCE, t, "w") for t in tensors))
        return running.each(lambda rank, backend: backend.traffic()), [c.traffic for c in done]


def test_bytes_of_a_sum_over_colocated_servers():
    size, num_bytes = 2, 1 << 20
    total, own = steady_steps(ZmqPsOptions(), size, num_bytes)
    assert sum(t.sent_bytes for t in total) == 2 * (size - 1) * num_bytes
    assert sum(t.received_bytes for t in total) == 2 * (size - 1) * num_bytes
    link = busiest_link_bytes(num_bytes, size, ZmqPsOptions())
    for traffic, request in zip(total, own, strict=True):
        assert traffic.sent_bytes == traffic.received_bytes == link
        assert request.sent_bytes == request.received_bytes == num_bytes // 2
        assert request.local_bytes == num_bytes  # half goes to the own server and comes back
        assert traffic.header_bytes > 0


def test_bytes_of_a_sum_over_dedicated_servers():
    size, num_bytes = 3, 1 << 20
    total, own = steady_steps(ZmqPsOptions(servers="dedicated:2"), size, num_bytes)
    for traffic in (*total, *own):
        assert traffic.sent_bytes == traffic.received_bytes == num_bytes
        assert traffic.local_bytes == 0


@pytest.mark.parametrize(
    ("note", "make"),
    [
        (
            {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
            lambda p: torch.optim.SGD([p], 0.1, 0.9, weight_decay=0.01, nesterov=True),
        ),
        (
            {"optimizer": "adam", "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.01},
            lambda p: torch.optim.Adam([p], 0.1, (0.8, 0.9), 1e-6, 0.01),
        ),
        (
            {"optimizer": "adamw", "weight_decay": 0.1},
            lambda p: torch.optim.AdamW([p], 0.1, weight_decay=0.1),
        ),
    ],
)
def test_updates_on_the_servers_equal_torch_in_one_process(note, make):
    size, num_elements, num_steps = 3, 5000, 6
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(num_elements, generator=generator)
    gradients = torch.randn(num_steps, size, num_elements, generator=generator)
    rates = [0.1 / (1 + step) for step in range(num_steps)]

    reference = start.clone()
    optimizer = make(reference)
    for step in range(num_steps):
        reference.grad = gradients[step].mean(0)
        optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.step()

    def train(rank, backend):
        value = start.clone() if rank == 0 else torch.full_like(start, -1.0)
        backend.submit(Request(Op.INSTALL, value, "w", note=json.dumps(note))).wait()
        assert torch.equal(value, start)
        for step in range(num_steps):
            value.copy_(gradients[step, rank])
            request = Request(Op.APPLY, value, "w", step=step, learning_rate=rates[step])
            done = backend.submit(request).wait()
            assert (done.version, done.staleness) == (step + 1, 0)
        return value

    options = ZmqPsOptions(servers="dedicated:2", update="server", slice_kib=1)
    with job(size, options) as running:
        for value in running.each(train):
            torch.testing.assert_close(value, reference, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("consistency", ["ssp:2", "async"])
def test_loosely_coupled_workers_apply_every_gradient_once(consistency):
    size, num_steps = 3, 20
    options = ZmqPsOptions(servers="dedicated:2", consistency=consistency, slice_kib=1)
    met = threading.Barrier(size)

    def train(rank, backend):
        value = torch.zeros(1000)
        backend.submit(Request(Op.INSTALL, value, "w", note="{}")).wait()
        lags = []
        for step in range(num_steps):
            value.fill_(1.0)
            request = Request(Op.APPLY, value, "w", step=step, learning_rate=1.0)
            done = backend.submit(request).wait()
            lags.append(done.staleness)
            assert done.version >= step + 1
        met.wait(30)
        backend.submit(Request(Op.BARRIER)).wait()
        value.fill_(0.0)
        backend.submit(Request(Op.APPLY, value, "w", step=num_steps, learning_rate=1.0)).wait()
        return value, max(lags)

    with job(size, options) as running:
        assert running.backends[0].capabilities.consistency == consistency
        for value, lag in running.each(train):
            torch.testing.assert_close(value, torch.full((1000,), -float(num_steps)))
            assert consistency == "async" or lag <= 2


def test_a_worker_that_closed_no_longer_holds_back_the_others():
    options = ZmqPsOptions(servers="dedicated:1", consistency="ssp:1")

    def train(rank, backend):
        value = torch.zeros(10)
        backend.submit(Request(Op.INSTALL, value, "w", note="{}")).wait()
        if rank == 1:
            backend.close()
            return 0
        for step in range(10):
            backend.submit(Request(Op.APPLY, value, "w", step=step)).wait()
        return 10

    with job(2, options) as running:
        assert running.each(train) == [10, 0]


def test_ranks_that_disagree_both_hear_what_differs():
    with job(2, ZmqPsOptions(servers="dedicated:1")) as running:

        def disagree(rank, backend):
            work = backend.submit(Request(Op.ALL_REDUCE, torch.ones(4 + rank), "w"))
            with pytest.raises(Disagreement, match="total_elements is"):
                work.wait()

        running.each(disagree)
        # Nobody says goodbye after a failure: the launcher's loss ends the servers.
        running.controls[0].report_failure("the ranks disagree")
        with pytest.raises(RankLost):
            running.servers[0].result(30)
        running.servers.clear()


def test_a_rank_that_does_not_come_runs_into_the_deadline():
    with job(2, ZmqPsOptions(servers="dedicated:1")) as running:
        first = running.backends[0].submit(Request(Op.ALL_REDUCE, torch.ones(4), "w"))
        with pytest.raises(DeadlineExceeded):
            first.wait(0.0)
        running.backends[1].submit(Request(Op.ALL_REDUCE, torch.ones(4), "w")).wait()
        assert first.wait().tensor.tolist() == [2.0] * 4


def test_a_loss_fails_what_waits_and_what_comes_and_close_still_works():
    with job(2, ZmqPsOptions(servers="dedicated:1")) as running:
        work = running.backends[0].submit(Request(Op.ALL_REDUCE, torch.ones(4), "conv1", step=7))
        running.controls[1].report_failure("out of memory")
        with pytest.raises(RankLost, match=r"rank 1 is lost: out of memory.*conv1.*step 7"):
            work.wait()
        with pytest.raises(RankLost):
            running.backends[0].submit(Request(Op.BARRIER)).wait()
        with pytest.raises(RankLost, match="this server was serving"):
            running.servers[0].result(30)
        running.servers.clear()


def server_processes():
    """Of this process's own ranks; other jobs' ranks have servers of theirs."""
    return [
        child
        for child in psutil.Process().children()
        if "testbed.backends.zmq_ps.server_process" in child.cmdline()
    ]


def test_a_killed_colocated_server_is_a_loss_for_all():
    with job(2, ZmqPsOptions()) as running:
        victim, other = server_processes()
        assert not any("secret" in word for word in victim.cmdline() + other.cmdline())
        victim.kill()

        def sum_forever(backend):
            while True:
                backend.submit(Request(Op.ALL_REDUCE, torch.ones(1 << 16), "w")).wait()

        def wait_for_the_loss(rank, backend):
            with pytest.raises(RankLost, match=r"parameter server \d.*ended with status -9"):
                sum_forever(backend)

        running.each(wait_for_the_loss)
    assert server_processes() == []


def test_nothing_is_left_after_close():
    def cycle():
        with job(2, ZmqPsOptions()) as running:
            assert len(server_processes()) == 2
            running.request(*(Request(Op.ALL_REDUCE, torch.ones(1 << 18), "w") for _ in range(2)))
            running.each(lambda rank, backend: backend.close())
            with pytest.raises(UsageError, match="closed"):
                running.backends[0].submit(Request(Op.BARRIER))
        assert server_processes() == []

    cycle()  # starts what pyzmq keeps for the whole process: one thread that frees sent buffers
    threads, descriptors = threading.active_count(), psutil.Process().num_fds()
    cycle()
    assert threading.active_count() == threads
    assert psutil.Process().num_fds() == descriptors


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(Op.ALL_REDUCE), "has no tensor"),
        (Request(Op.ALL_REDUCE, torch.ones(2), channel=5), "channel is 5"),
        (Request(Op.FOLD, torch.ones(2), "w", channel=5), "channel is 5"),
        (Request(Op.SPREAD, torch.ones(2), "w"), "no fold to bring back"),
        (Request(Op.APPLY, torch.ones(2), "w"), "need update=server"),
    ],
)
def test_bad_requests_are_refused_at_once(request_, message):
    with job(1, ZmqPsOptions(servers="dedicated:1")) as running:
        (backend,) = running.backends
        with pytest.raises(UsageError, match=message):
            backend.submit(request_)
        good = torch.ones(2)
        backend.submit(Request(Op.FOLD, good, "w")).wait()
        backend.submit(Request(Op.SPREAD, good, "w")).wait()
