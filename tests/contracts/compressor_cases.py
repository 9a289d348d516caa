"""Compressors over a real backend, as cases that every rank runs."""

from __future__ import annotations

import torch

from testbed.backends.protocol import Backend, Group
from testbed.compression.chain import resolve_compressor
from testbed.compression.lockstep import Lockstep
from testbed.compression.protocol import Arrived, Context, Form, Round, State
from testbed.nouns import Traffic, Verb
from testbed.training.digest import digest_tensors
from tests.contracts.cases import device_of, do
from tests.harness.compressors import SHAPES, messages

VERBS = {Form.SUM: Verb.SUM, Form.GATHER: Verb.GATHER}
NUM_STEPS = 2


def same_as_in_lockstep(backend: Backend, group: Group, spec: str, sizes: tuple[int, ...]) -> str:
    """All steps' means equal those of ranks in one thread; a digest of their bits is returned."""
    compressor = resolve_compressor(spec)
    means = []
    for size in sizes:
        shapes = SHAPES if size == 700 else ((size,),)
        alone = Lockstep(compressor, group.size, shapes=shapes)
        state: State = {}
        for step in range(NUM_STEPS):
            values = messages(group.size, step, size)
            context = Context(group.rank, group.size, step, key="message", shapes=shapes)
            mine = values[group.rank].to(device_of(backend))
            mean, state, _ = converse(backend, spec, mine, state, context)
            expected = alone.exchange(values)[group.rank].mean
            # Sums of a backend may be added in another order than the rank order.
            torch.testing.assert_close(mean.cpu(), expected, rtol=2e-2, atol=2e-2)
            if "fp16" not in spec and "bf16" not in spec:
                torch.testing.assert_close(mean.cpu(), expected, rtol=1e-4, atol=1e-4)
            means.append(mean)
    return digest_tensors(means)


def bytes_of_one_exchange(
    backend: Backend, group: Group, spec: str, num_elements: int
) -> tuple[int, int, int, bool, int]:
    """Bytes received, payload bytes given and by the formula, whether a sum, helper processes."""
    context = Context(group.rank, group.size, key="message", shapes=((num_elements,),))
    values = messages(group.size, 0, num_elements)[group.rank].to(device_of(backend))
    _, _, rounds = converse(backend, spec, values, {}, context)
    formula = resolve_compressor(spec).payload_bytes(num_elements, 4, context).most
    return (
        sum(moved.received_bytes for _, moved in rounds),
        sum(given.num_bytes for given, _ in rounds),
        formula,
        rounds[0][0].form is Form.SUM,
        backend.capabilities.num_helper_processes,
    )


def converse(
    backend: Backend, spec: str, values: torch.Tensor, state: State, context: Context
) -> tuple[torch.Tensor, State, list[tuple[Round, Traffic]]]:
    """Drive one conversation: the mean, the new state, and the rounds with their traffic."""
    talk = resolve_compressor(spec).exchange(values, state, context)
    rounds = []
    given = next(talk)
    while True:
        key = f"{spec} {values.numel()} round {len(rounds)}"
        done = do(backend, VERBS[given.form], given.parts[0], key=key, step=context.step)
        rounds.append((given, done.traffic))
        parts = done.parts if given.form is Form.GATHER else (given.parts[0],)
        try:
            given = talk.send(Arrived(parts))
        except StopIteration as stop:
            return stop.value.mean, stop.value.state, rounds
