"""A mean that takes the place of the values it is of: the same bits as one in memory of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from testbed.base.types import Op
from testbed.compression.gathered import gathered_mean
from testbed.compression.lockstep import Lockstep, carry_out
from testbed.compression.protocol import Arrived, Compressor, Context, Round
from testbed.compression.server_merge import merge
from testbed.compression.sparse import pack_sparse
from testbed.compression.sparse_mean import SparseMerger
from tests.harness.compressors import SHAPES, SPECS, keeping, messages, resolve_compressor

IN_PLACE = ("topk", "topk-sampled", "threshold:value=0.5", "dgc", "ef+topk", "warmup+topk")


@dataclass(frozen=True)
class Placed:
    """A compressor that may put the mean where the values are, as in training."""

    inner: Compressor

    def exchange(self, values, state, context):
        return self.inner.exchange(values, state, replace(context, out=values))


def served(rounds: Sequence[Round]) -> list[Arrived]:
    """As a server that merges answers, without loss."""
    first = rounds[0]
    if first.op is not Op.ALL_GATHER or first.merger is None:
        return carry_out(rounds)
    payloads = tuple(given.parts[0] for given in rounds)
    pulled, _ = merge(first.merger, payloads, torch.zeros(700), {}, Context())
    return [pulled.arrived() for _ in rounds]


@pytest.mark.parametrize("answer", [None, served])
@pytest.mark.parametrize("spec", dict.fromkeys([*SPECS, *map(keeping, SPECS)]))
def test_means_and_states_are_the_same_wherever_the_mean_lies(spec, answer):
    compressor = resolve_compressor(spec)
    apart = Lockstep(compressor, 3, shapes=SHAPES, answer=answer)
    placed = Lockstep(Placed(compressor), 3, shapes=SHAPES, answer=answer)
    for step in range(4):
        of_its_own = apart.exchange(messages(3, step))
        in_place = placed.exchange(messages(3, step))
        for one, other in zip(of_its_own, in_place, strict=True):
            assert torch.equal(one.mean, other.mean)
    for one, other in zip(apart.states, placed.states, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_residual_that_ages_is_the_same_in_its_old_memory():
    compressor = resolve_compressor("ef:units=update+topk:ratio=0.1")
    draw = torch.Generator().manual_seed(3)
    gradients = [torch.randn(700, generator=draw) for _ in range(5)]
    states = []
    for placed in (False, True):
        state: dict[str, torch.Tensor] = {}
        for step, gradient in enumerate(gradients):
            values = gradient.clone()
            context = Context(step=step, learning_rate=1.0 / (step + 1))
            context = replace(context, out=values if placed else None)
            talk = compressor.exchange(values, state, context)
            (payload,) = next(talk).parts
            with pytest.raises(StopIteration) as stop:
                talk.send(Arrived((payload,)))
            state = stop.value.value.state
        states.append(state)
    assert torch.equal(states[0]["residual"], states[1]["residual"])


@pytest.mark.parametrize("answer", [None, served])
@pytest.mark.parametrize("spec", IN_PLACE)
def test_sparse_means_need_no_memory_of_their_own(spec, answer):
    placed = Lockstep(Placed(resolve_compressor(spec)), 2, shapes=SHAPES, answer=answer)
    values = messages(2)
    done = placed.exchange(values)
    assert all(ended.mean is given for ended, given in zip(done, values, strict=True))


@pytest.mark.parametrize("wrong", [torch.zeros(5), torch.zeros(6, dtype=torch.float64)])
def test_memory_of_another_form_is_left_alone(wrong):
    payload = pack_sparse(torch.tensor([3]), torch.tensor([4.0]), 6)
    talk = gathered_mean(SparseMerger(), payload, torch.zeros(6), wrong)
    (given,) = next(talk).parts
    with pytest.raises(StopIteration) as stop:
        talk.send(Arrived((given,)))
    assert stop.value.value.tolist() == [0.0, 0.0, 0.0, 4.0, 0.0, 0.0]
    assert not wrong.any()
