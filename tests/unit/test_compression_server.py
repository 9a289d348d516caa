"""A server that merges: ranks get the same as from each other, with fewer payloads pulled."""

import dataclasses

import pytest
import torch

from testbed.base.types import Op
from testbed.compression.lockstep import Lockstep, carry_out
from testbed.compression.protocol import Context
from testbed.compression.server_merge import merge
from testbed.compression.topk import TopK
from tests.harness.compressors import SHAPES, SPECS, job, keeping, messages, resolve_compressor


class Server:
    """Answers the rounds of a job as a merging server would; counts what it sends."""

    def __init__(self, num_elements, again=None):
        self.state, self.again, self.pulled_bytes = {}, again, []
        self.like = torch.zeros(num_elements)

    def answer(self, rounds):
        if rounds[0].op is not Op.ALL_GATHER or rounds[0].merger is None:
            return carry_out(rounds)
        payloads = tuple(given.parts[0] for given in rounds)
        context = Context(rank=-1, key="message")
        merger = rounds[0].merger
        pulled, self.state = merge(merger, payloads, self.like, self.state, context, self.again)
        self.pulled_bytes.append(pulled.payload.numel())
        return [pulled.arrived() for _ in rounds]


def served(spec, num_workers, again=None):
    server = Server(700, again)
    compressor = resolve_compressor(spec)
    return server, Lockstep(compressor, num_workers, shapes=SHAPES, answer=server.answer)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_a_lossless_server_gives_what_the_ranks_would_give_each_other(spec, num_workers):
    spec = keeping(spec)
    server, ranks = served(spec, num_workers)
    alone = job(spec, num_workers)
    for step in range(3):
        values = messages(num_workers, step)
        torch.testing.assert_close(
            ranks.exchange(values)[0].mean, alone.exchange(values)[0].mean, rtol=1e-6, atol=1e-7
        )
    assert all(size <= 700 * 4 + 4 for size in server.pulled_bytes)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_a_server_that_sparsifies_again_loses_nothing_over_time(num_workers):
    server, ranks = served("ef+topk:ratio=0.02", num_workers, again=TopK(0.02))
    given_sum, sent_sum = torch.zeros(700), torch.zeros(700)
    for step in range(10):
        values = messages(num_workers, step)
        given_sum += torch.stack(values).mean(0)
        sent_sum += ranks.exchange(values)[0].mean
    kept = torch.stack([state["residual"] for state in ranks.states]).mean(0)
    torch.testing.assert_close(
        sent_sum + kept + server.state["residual"], given_sum, rtol=1e-5, atol=1e-5
    )
    (pushed,) = {given // 10 for given in ranks.given_bytes}
    assert set(server.pulled_bytes) == {pushed}


def test_pulled_bytes_are_the_union_or_again_as_few_as_pushed():
    server, ranks = served("topk:ratio=0.02", 4)
    ranks.exchange(messages(4))
    assert ranks.given_bytes[0] < server.pulled_bytes[0] <= 4 * ranks.given_bytes[0]


def test_a_vote_is_pulled_in_one_or_two_bits():
    for num_workers, bits in ((3, 1), (4, 2)):
        server, ranks = served("sign", num_workers)
        ranks.exchange(messages(num_workers))
        assert server.pulled_bytes == [4 + -(-700 * bits // 8)]


def test_quantisers_encode_the_mean_again():
    codec = resolve_compressor("qsgd").codec
    server, ranks = served("qsgd", 3, again=codec)
    mean = ranks.exchange(messages(3))[0].mean
    (pushed,) = set(ranks.given_bytes)
    assert server.pulled_bytes == [pushed]
    wanted = mean + server.state["residual"]
    torch.testing.assert_close(wanted, job("qsgd", 3).exchange(messages(3))[0].mean)


def test_rounds_can_be_rewritten():
    # What drives a conversation may hand the merger on: rounds are values.
    talk = resolve_compressor("topk").exchange(torch.ones(100), {}, Context())
    first = next(talk)
    assert dataclasses.replace(first, merger=None).num_bytes == first.num_bytes == 5
