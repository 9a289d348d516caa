"""A server that merges: message by message, and over real sockets."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.backends.zmq_ps.options import ZmqPsOptions
from testbed.backends.zmq_ps.placement import Owners, place
from testbed.backends.zmq_ps.server_merge import Merges
from testbed.backends.zmq_ps.server_process import ServerState
from testbed.backends.zmq_ps.wire import Flag, Header, Operation, Packet
from testbed.base.errors import Disagreement, RankLost, UsageError
from testbed.base.types import Op, Request
from testbed.compression.protocol import Context
from testbed.compression.quantize import Levels, Quantised
from testbed.compression.server_merge import describe, encoder_of, merge
from testbed.compression.sign import OneBit, Sign
from testbed.compression.sparse_mean import SparseMerger
from testbed.compression.topk import Threshold, TopK
from tests.harness.compressors import messages
from tests.unit.test_zmq_backend import job

SIZE = 700
LIKE = torch.zeros(SIZE)


def payloads_of(codec, num_workers, step=0):
    context = Context(key="w", step=step)
    return [codec.encode(v, replace(context, rank=r)).payload
            for r, v in enumerate(messages(num_workers, step))]  # fmt: skip


def slices(worker, payload, note, slice_bytes=100, **fields):
    """A worker's messages as a client cuts them."""
    for piece in place("w", payload.numel(), 1, 1, slice_bytes):
        header = Header(
            Operation.MERGE,
            worker,
            flags=Flag.PAYLOAD,
            offset=piece.offset,
            num_elements=piece.num_elements,
            total_elements=payload.numel(),
            key="w",
            note=b"" if piece.offset else note.encode(),
            **fields,
        )
        stop = piece.offset + piece.num_elements
        yield Packet(header, payload[piece.offset : stop].clone())


@given(st.permutations(range(3)), st.sampled_from([TopK(0.3), Threshold(1.0), Threshold(1e9)]))
@settings(deadline=None)
def test_payloads_are_merged_in_rank_order_whatever_the_order_of_arrival(order, codec):
    payloads = payloads_of(codec, 3)
    note = describe(codec, SIZE, torch.float32)
    arriving = [list(slices(worker, payloads[worker], note)) for worker in order]
    state, replies = ServerState(3), []
    while any(arriving):  # in turns: slices of several workers come between each other
        for left in arriving:
            if left:
                replies += state.handle(left.pop(0))
    expected, _ = merge(codec, tuple(payloads), LIKE, {}, Context())
    assert [reply.header.worker for reply in replies] == [0, 1, 2]
    for reply in replies:
        assert torch.equal(reply.payload, expected.payload)
        assert reply.header.flags == Flag.PAYLOAD
        assert reply.header.total_elements == expected.payload.numel()
    assert state.num_open == 0


def exchange(merges, payloads, note, step):
    """All workers' payloads in; the one answer, checked to be the same for all."""
    replies = []
    for worker, payload in enumerate(payloads):
        for message in slices(worker, payload, note, step=step, sequence=step):
            replies += merges.push(message)
    assert len(replies) == len(payloads)
    assert all(torch.equal(reply.payload, replies[0].payload) for reply in replies)
    return replies[0]


@pytest.mark.parametrize("codec", [TopK(0.02), Quantised(Levels(4, 512, "l2"))])
def test_a_server_that_encodes_again_keeps_what_it_did_not_send(codec):
    merges = Merges(3)
    note = describe(codec, SIZE, torch.float32, again=codec)
    pushed_sum, pulled_sum = torch.zeros(SIZE), torch.zeros(SIZE)
    for step in range(5):
        payloads = payloads_of(codec, 3, step)
        pushed_sum += codec.combine(tuple(payloads), LIKE)
        reply = exchange(merges, payloads, note, step)
        assert reply.header.flags & Flag.REPACKED
        assert reply.payload.numel() == payloads[0].numel()
        pulled_sum += codec.combine((reply.payload,), LIKE)
    assert merges.state_bytes == 4 * SIZE
    kept = merges.residual("w")
    torch.testing.assert_close(pulled_sum + kept, pushed_sum, rtol=1e-5, atol=1e-5)


def test_without_repacking_nothing_is_kept():
    merges = Merges(2)
    codec = TopK(0.1)
    exchange(merges, payloads_of(codec, 2), describe(codec, SIZE, torch.float32), 0)
    assert merges.state_bytes == 0


@pytest.mark.parametrize(
    ("merger", "authors"),
    [
        (SparseMerger(), False),
        (TopK(0.1), False),
        (Quantised(Levels(4, 512, "max")), False),
        (Quantised(OneBit()), True),
        (Sign(), False),
        (Sign(vote=False, scaled=True), True),
    ],
)
def test_servers_encode_again_where_the_authors_do_and_what_can_encode_where_asked_to(
    merger, authors
):
    asked = None if merger == SparseMerger() else merger  # which only combines
    assert encoder_of(merger, None) == (merger if authors else None)
    assert encoder_of(merger, True) == asked
    assert encoder_of(merger, False) is None


def errors_of(state, *all_messages):
    replies = [reply for message in all_messages for reply in state.handle(message)]
    return [r for r in replies if r.header.flags & Flag.ERROR]


def test_wrong_payloads_are_told_to_all_workers():
    codec = TopK(0.1)
    note = describe(codec, SIZE, torch.float32)
    good, other = payloads_of(codec, 2)
    broken = {
        "is no selection from 700": (good, other[:-1], note),
        "compressor with the same options": (good, other, describe(TopK(0.2), SIZE, torch.float32)),
        "merger's description": (good, other, "nonsense"),
    }
    for complaint, (first, second, second_note) in broken.items():
        own_note = note if second_note != "nonsense" else "nonsense"
        both = [*slices(0, first, own_note), *slices(1, second, second_note)]
        told = errors_of(ServerState(2), *both)
        assert [error.header.worker for error in told] == [0, 1]
        assert all(complaint in error.header.note.decode() for error in told), told[0].header.note


def test_a_payload_that_comes_twice_is_refused():
    note = describe(TopK(0.1), SIZE, torch.float32)
    first, *_ = slices(0, payloads_of(TopK(0.1), 2)[0], note)
    (told, _) = errors_of(ServerState(2), first, first)
    assert b"twice" in told.header.note


@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    num_servers=st.integers(1, 5),
    channel=st.integers(0, 3),
)
def test_owners_are_balanced_by_bytes_and_stay(sizes, num_servers, channel):
    owners = Owners(num_servers)
    loads = [0] * num_servers
    for number, size in enumerate(sizes):
        loads[owners.owner(channel, f"key {number}", size)] += max(1, size)
    assert max(loads) - min(loads) <= max(1, *sizes)
    again = [owners.owner(channel, f"key {number}", 0) for number in range(len(sizes))]
    twin = Owners(num_servers)
    assert again == [twin.owner(channel, f"key {n}", size) for n, size in enumerate(sizes)]


def merge_request(payload, codec, again=None, **more):
    note = describe(codec, SIZE, torch.float32, again)
    return Request(Op.MERGE, payload, key="w", note=note, **more)


@pytest.mark.parametrize("servers", ["colocated:1", "dedicated:2"])
def test_repacked_pulls_are_as_short_as_pushes_over_sockets(servers):
    """On whichever channel the key comes: its server has what it did not send."""
    codec = TopK(0.02)
    with job(2, ZmqPsOptions(servers=servers), num_channels=2) as running:
        state = {}
        for step in range(3):
            payloads = payloads_of(codec, 2, step)
            expected, state = merge(codec, tuple(payloads), LIKE, state, Context(), again=codec)
            asked = (merge_request(p, codec, codec, step=step, channel=step % 2) for p in payloads)
            done = running.request(*asked)
            for combined in done:
                assert not combined.lossless
                assert torch.equal(combined.tensor, expected.payload)
                assert combined.tensor.numel() == payloads[0].numel()


def test_ranks_that_name_different_mergers_are_told():
    with job(2, ZmqPsOptions(servers="dedicated:1")) as running:
        payload = payloads_of(TopK(0.1), 1)[0]

        def disagree(rank, backend):
            work = backend.submit(merge_request(payload, TopK(0.1 + 0.1 * rank)))
            with pytest.raises(Disagreement, match="one compressor with the same options"):
                work.wait()

        running.each(disagree)
        # Nobody says goodbye after a failure: the launcher's loss ends the servers.
        running.controls[0].report_failure("the ranks disagree")
        with pytest.raises(RankLost):
            running.servers[0].result(30)
        running.servers.clear()


def test_what_no_server_could_merge_is_refused_at_once():
    with job(1, ZmqPsOptions()) as running:
        good = merge_request(payloads_of(TopK(0.1), 1)[0], TopK(0.1))
        for wrong, complaint in (
            (replace(good, note="{}"), "merger's description"),
            (replace(good, tensor=torch.ones(3)), "expected a payload of uint8"),
            (replace(good, tensor=torch.ones(2, 2, dtype=torch.uint8)), "expected one"),
        ):
            with pytest.raises(UsageError, match=complaint):
                running.request(wrong)
        running.request(good)
