"""The server's state, driven message by message: rank order, its plain twin, the bound of SSP."""

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from testbed.backends.checks import NAMES
from testbed.backends.zmq_ps.placement import place
from testbed.backends.zmq_ps.server_process import ServerState
from testbed.backends.zmq_ps.wire import Flag, Header, Operation, Packet, Refused
from tests.harness.plain_server import PlainServer

SGD = json.dumps({"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01})
ADAM = json.dumps({"optimizer": "adam", "eps": 1e-6})


def message(operation, worker, tensor, *, payload=True, **fields):
    """One whole tensor as one slice."""
    header = Header(
        operation=operation,
        worker=worker,
        dtype=NAMES[tensor.dtype],
        flags=Flag.PAYLOAD if payload else Flag.NONE,
        num_elements=tensor.numel(),
        total_elements=tensor.numel(),
        **fields,
    )
    return Packet(header, tensor.clone() if payload else None)


def cut(whole, num_servers, slice_bytes):
    """The messages per server into which placement cuts a whole one."""
    header = whole.header
    for piece in place(
        header.key, header.num_elements, header.element_size, num_servers, slice_bytes
    ):
        part = None
        if whole.payload is not None:
            part = whole.payload[piece.offset : piece.offset + piece.num_elements].clone()
        yield (
            piece.server,
            Packet(replace(header, offset=piece.offset, num_elements=piece.num_elements), part),
        )


class Sharded:
    """Several server states behind one front, cut by placement; answers are put together again."""

    def __init__(self, num_workers, staleness, num_servers, slice_bytes):
        self.servers = [ServerState(num_workers, staleness) for _ in range(num_servers)]
        self.slice_bytes = slice_bytes

    def handle(self, whole):
        """Worker -> (tensor, version, staleness) for all that were answered."""
        answers = {}
        for server, part in cut(whole, len(self.servers), self.slice_bytes):
            for reply in self.servers[server].handle(part):
                answers.setdefault(reply.header.worker, []).append(reply)
        return {worker: self._whole(replies) for worker, replies in answers.items()}

    @staticmethod
    def _whole(replies):
        replies.sort(key=lambda reply: reply.header.offset)
        tensors = [reply.payload for reply in replies if reply.payload is not None]
        whole = torch.cat(tensors).clone() if tensors else None
        (version,) = {reply.header.version for reply in replies}
        (staleness,) = {reply.header.staleness for reply in replies}
        return whole, version, staleness


@given(st.permutations(range(4)), st.sampled_from([torch.float32, torch.bfloat16, torch.int32]))
def test_sums_are_in_rank_order_whatever_the_order_of_arrival(order, dtype):
    torch.manual_seed(0)
    terms = [(torch.randn(50) * 10**rank).to(dtype) for rank in range(4)]
    state = ServerState(4)
    for worker in order:
        replies = state.handle(message(Operation.ALL_REDUCE, worker, terms[worker], key="w"))
        assert bool(replies) == (worker == order[-1])
    expected = ((terms[0] + terms[1]) + terms[2]) + terms[3]
    assert [reply.header.worker for reply in replies] == [0, 1, 2, 3]
    assert all(torch.equal(reply.payload, expected) for reply in replies)
    assert state.num_open == 0


@settings(deadline=None)
@given(
    num_workers=st.integers(1, 4),
    num_servers=st.integers(1, 3),
    slice_kib=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_sharded_sums_equal_the_plain_twin(num_workers, num_servers, slice_kib, seed):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    plain = PlainServer(num_workers)
    sharded = Sharded(num_workers, 0, num_servers, slice_kib * 1024)
    for sequence in range(3):
        workers = rng.sample(range(num_workers), num_workers)
        for worker in workers:
            term = torch.randn(5000, generator=generator)
            expected = plain.sum(f"w {sequence}", worker, term)
            got = sharded.handle(
                message(Operation.ALL_REDUCE, worker, term, key="w", sequence=sequence)
            )
            assert (expected is None) == (not got)
        assert expected is not None
        assert set(got) == set(range(num_workers))
        assert all(torch.equal(tensor, expected) for tensor, _, _ in got.values())


@settings(deadline=None)
@given(
    num_workers=st.integers(1, 4),
    staleness=st.sampled_from([0, 1, 3, None]),
    note=st.sampled_from([SGD, ADAM]),
    seed=st.integers(0, 1000),
)
def test_sharded_parameters_equal_the_plain_twin(num_workers, staleness, note, seed):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(1500, generator=generator)
    plain = PlainServer(num_workers, staleness)
    sharded = Sharded(num_workers, staleness, 3, 1024)
    plain.install("w", start, note)
    for worker in range(num_workers):
        install = message(Operation.INSTALL, worker, start, payload=worker == 0, key="w")
        installed = sharded.handle(
            Packet(replace(install.header, note=note.encode()), install.payload)
        )
    assert set(installed) == set(range(num_workers))
    waiting, present = set(), set(range(num_workers))
    for sequence in range(25):
        free = sorted(present - waiting)
        if not free:
            break
        worker = rng.choice(free)
        if staleness != 0 and len(present) > 1 and rng.random() < 0.05:
            present.discard(worker)
            expected = plain.depart(worker)["w"]
            goodbye = Packet(Header(Operation.GOODBYE, worker))
            replies = [m for state in sharded.servers for m in state.handle(goodbye)]
            assert {m.header.worker for m in replies if m.payload is not None} == set(expected)
            waiting -= set(expected)
            continue
        gradient = torch.randn(1500, generator=generator)
        expected = plain.apply("w", worker, gradient, 0.05)
        push = message(
            Operation.APPLY, worker, gradient, key="w", sequence=sequence, learning_rate=0.05
        )
        got = sharded.handle(push)
        waiting = (waiting | {worker}) - set(expected)
        assert set(got) == set(expected)
        for rank, (tensor, version, lag) in expected.items():
            assert torch.equal(got[rank][0], tensor)
            assert got[rank][1:] == (version, lag)


@settings(deadline=None)
@given(
    num_workers=st.integers(2, 5),
    staleness=st.integers(1, 4),
    choices=st.lists(st.integers(0, 1000), min_size=20, max_size=80),
)
def test_ssp_never_exceeds_its_bound_and_never_waits_without_need(num_workers, staleness, choices):
    state = installed_state(num_workers, staleness)
    clocks, waiting = [0] * num_workers, set()
    for choice in choices:
        free = [worker for worker in range(num_workers) if worker not in waiting]
        slowest = clocks.index(min(clocks))
        assert slowest in free, "the slowest worker must always be able to go on"
        worker = free[choice % len(free)]
        clocks[worker] += 1
        waiting.add(worker)
        for reply in state.handle(push(worker, clocks[worker])):
            header = reply.header
            assert header.staleness == clocks[header.worker] - min(clocks) <= staleness
            assert header.version == sum(clocks)
            waiting.remove(header.worker)
        assert all(clocks[worker] - min(clocks) > staleness for worker in waiting)


def installed_state(num_workers, staleness):
    state = ServerState(num_workers, staleness)
    start = torch.zeros(4)
    for worker in range(num_workers):
        state.handle(message(Operation.INSTALL, worker, start, payload=worker == 0, key="w"))
    return state


def push(worker, clock, value=1.0):
    gradient = torch.full((4,), value)
    return message(Operation.APPLY, worker, gradient, key="w", sequence=clock, learning_rate=1.0)


def test_a_worker_that_runs_ahead_is_held_at_the_bound():
    state = installed_state(2, 2)
    assert [len(state.handle(push(0, clock))) for clock in (1, 2, 3)] == [1, 1, 0]
    (slow, fast) = sorted(state.handle(push(1, 1)), key=lambda m: -m.header.worker)
    assert (slow.header.staleness, fast.header.staleness) == (0, 2)
    assert torch.equal(fast.payload, torch.full((4,), -2.0))  # four gradients of 1, halved
    assert fast.header.version == 4


def test_async_never_waits():
    state = installed_state(2, None)
    for clock in range(1, 50):
        (reply,) = state.handle(push(0, clock))
        assert reply.header.staleness == clock


def test_a_worker_that_leaves_holds_nobody_back():
    state = installed_state(3, 1)
    state.handle(push(0, 1))
    state.handle(push(1, 1))
    assert state.handle(push(0, 2)) == []
    released = state.handle(Packet(Header(Operation.GOODBYE, 2)))
    assert {m.header.worker: m.header.staleness for m in released if m.payload is not None} == {
        0: 1
    }
    with pytest.raises(Refused, match="already left"):
        state.handle(push(2, 1))


def fold(operation, worker, sequence, **fields):
    payload = operation is Operation.FOLD
    return message(
        operation, worker, torch.ones(3), payload=payload, key="w", sequence=sequence, **fields
    )


def test_a_fold_is_kept_until_all_have_spread_it():
    state = ServerState(2)
    assert state.handle(fold(Operation.FOLD, 0, 0)) == []
    assert state.handle(fold(Operation.SPREAD, 0, 0)) == []
    answers = state.handle(fold(Operation.FOLD, 1, 0))
    assert [(m.header.operation, m.header.worker) for m in answers] == [
        (Operation.FOLD, 0),
        (Operation.FOLD, 1),
        (Operation.SPREAD, 0),
    ]
    assert state.num_open == 1
    (spread,) = state.handle(fold(Operation.SPREAD, 1, 0))
    assert torch.equal(spread.payload, torch.full((3,), 2.0))
    assert state.num_open == 0


def test_folds_that_are_never_spread_do_not_pile_up():
    state = ServerState(2)
    for sequence in range(10):
        for worker in (1, 0):
            sent = fold(Operation.FOLD, worker, sequence)
            flags = sent.header.flags | (Flag.RENEWED if sequence else Flag.NONE)
            state.handle(Packet(replace(sent.header, flags=flags), sent.payload))
    assert state.num_open == 1


@pytest.mark.parametrize(
    "other",
    [
        message(Operation.ALL_REDUCE, 1, torch.ones(4), key="v"),
        message(Operation.ALL_REDUCE, 1, torch.ones(5), key="w"),
        message(Operation.ALL_REDUCE, 1, torch.ones(4, dtype=torch.float64), key="w"),
        message(Operation.ALL_REDUCE, 1, torch.ones(4), key="w", step=3),
        message(Operation.ALL_REDUCE, 0, torch.ones(4), key="w"),
    ],
)
def test_workers_that_disagree_all_hear_of_it(other):
    state = ServerState(3)
    state.handle(message(Operation.ALL_REDUCE, 0, torch.ones(4), key="w"))
    errors = state.handle(other)
    assert [m.header.worker for m in errors] == [0, 1, 2]
    assert all(m.header.flags & Flag.ERROR and m.header.note for m in errors)
    (late,) = state.handle(message(Operation.ALL_REDUCE, 2, torch.ones(4), key="w"))
    assert late.header.note == errors[0].header.note


@pytest.mark.parametrize(
    "stray",
    [
        message(Operation.ALL_REDUCE, 2, torch.ones(4)),
        message(Operation.ALL_REDUCE, 0, torch.ones(4), payload=False),
        message(Operation.BARRIER, 0, torch.ones(4)),
        message(Operation.BROADCAST, 0, torch.ones(4), root=1),
        message(Operation.INSTALL, 1, torch.ones(4)),
        Packet(Header(Operation.COUNTERS, 0)),
    ],
)
def test_stray_messages_change_nothing(stray):
    state = ServerState(2)
    with pytest.raises(Refused):
        state.handle(stray)
    assert state.num_open == 0


@pytest.mark.parametrize("note", [b"{", b'{"optimizer": "lion"}', b'{"momentum": -1.0}'])
def test_an_optimizer_that_is_not_known_is_told_to_all(note):
    state = ServerState(1)
    install = message(Operation.INSTALL, 0, torch.zeros(2), key="w")
    (error,) = state.handle(Packet(replace(install.header, note=note), install.payload))
    assert error.header.flags & Flag.ERROR
    assert b"optimizer" in error.header.note


def test_applying_what_was_not_installed_is_told():
    (error, *_) = ServerState(1).handle(push(0, 1))
    assert b"not installed" in error.header.note
