"""Compressors over a real backend, as cases that every rank runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from testbed.backends.mpi.options import RingOptions
from testbed.backends.protocol import Backend, Group
from testbed.base.types import Op, Request, Result, Traffic
from testbed.compression.lockstep import Lockstep, carry_out, handed_over_bytes
from testbed.compression.protocol import Arrived, Context, Round, State
from testbed.compression.server_merge import Pulled, describe, merge
from testbed.training.sampling import digest_tensors
from tests.contracts.cases import WITHIN_S, device_of, meet
from tests.harness.compressors import SHAPES, messages, resolve_compressor

NUM_STEPS = 2


@dataclass(frozen=True)
class Carried:
    """One round of one rank.

    Attributes:
        op: that carried it.
        given_bytes: that this rank handed over, the part for itself left out.
        answer_bytes: of a merged payload.
        element_bytes: of the tensors.
        traffic: that the backend counted for the request.
    """

    op: Op
    given_bytes: int
    answer_bytes: int
    element_bytes: int
    traffic: Traffic


@dataclass(frozen=True)
class Exchange:
    """One exchange of one rank.

    Attributes:
        rounds: in order.
        counted: by the backend, its servers' bytes included.
        formula_bytes: least and most bytes by the compressor's formula.
        switch_bytes: up to which this backend's sums go by recursive doubling.
    """

    rounds: tuple[Carried, ...]
    counted: Traffic
    formula_bytes: tuple[int, int]
    switch_bytes: int


def same_as_in_lockstep(backend: Backend, group: Group, spec: str, sizes: tuple[int, ...]) -> str:
    """All steps' means equal those of ranks in one thread; a digest of their bits is returned.

    Bit for bit, unless the backend adds sums in another order than the ranks'.
    """
    compressor = resolve_compressor(spec)
    merges = Op.MERGE in backend.capabilities.ops
    means = []
    for size in sizes:
        shapes = SHAPES if size == 700 else ((size,),)
        answer = partial(served, size) if merges else carry_out
        alone = Lockstep(compressor, group.size, shapes=shapes, answer=answer)
        state: State = {}
        for step in range(NUM_STEPS):
            values = messages(group.size, step, size)
            context = Context(group.rank, group.size, step, key="message", shapes=shapes)
            mine = values[group.rank].to(device_of(backend))
            mean, state, rounds = converse(backend, spec, mine, state, context)
            expected = alone.exchange(values)[group.rank].mean
            sums = any(carried.op is Op.ALL_REDUCE for carried in rounds)
            if mine.device.type == "cpu" and (backend.capabilities.exact_order or not sums):
                assert torch.equal(mean, expected), (spec, size, step)
            tolerance = 2e-2 if "fp16" in spec or "bf16" in spec else 1e-4
            torch.testing.assert_close(mean.cpu(), expected, rtol=tolerance, atol=tolerance)
            means.append(mean)
    return digest_tensors(means)


def served(num_elements: int, rounds: Sequence[Round]) -> list[Arrived]:
    """A round of all ranks as a backend whose servers merge carries it out."""
    merger = rounds[0].merger
    if merger is None:
        return carry_out(rounds)
    payloads = tuple(given.parts[0] for given in rounds)
    pulled, _ = merge(merger, payloads, torch.zeros(num_elements), {}, Context())
    return [pulled.arrived() for _ in rounds]


def exchanges(backend: Backend, group: Group, spec: str, num_elements: int) -> list[Exchange]:
    """Some steps' exchanges of one message, counted."""
    compressor = resolve_compressor(spec)
    settled = backend.capabilities.settled
    switch_bytes = (settled.fixed_switch_bytes or 0) if isinstance(settled, RingOptions) else 0
    found: list[Exchange] = []
    state: State = {}
    for step in range(NUM_STEPS):
        context = Context(group.rank, group.size, step, key="message", shapes=((num_elements,),))
        values = messages(group.size, step, num_elements)[group.rank].to(device_of(backend))
        meet(group, "before the exchange")
        before = backend.traffic()
        meet(group, "counted before the exchange")
        _, state, rounds = converse(backend, spec, values, state, context)
        meet(group, "all have the mean")
        counted = backend.traffic() - before
        meet(group, "counted after the exchange")
        bounds = compressor.payload_bytes(num_elements, 4, context)
        found.append(Exchange(tuple(rounds), counted, (bounds.least, bounds.most), switch_bytes))
    return found


def converse(
    backend: Backend, spec: str, values: torch.Tensor, state: State, context: Context
) -> tuple[torch.Tensor, State, list[Carried]]:
    """Drive one conversation: the mean, the new state, and its rounds."""
    talk = resolve_compressor(spec).exchange(values, state, context)
    rounds: list[Carried] = []
    arrived: Arrived | None = None
    while True:
        try:
            given = next(talk) if arrived is None else talk.send(arrived)
        except StopIteration as stop:  # at once, if there is nobody to talk to
            return stop.value.mean, stop.value.state, rounds
        request = request_of(backend, given, values, f"{spec} {values.numel()} {len(rounds)}")
        given_bytes = handed_over_bytes(given, context.rank)
        element_bytes = given.parts[0].element_size()
        done = backend.submit(request).wait(WITHIN_S)
        answer_bytes = 0
        if request.op is Op.MERGE and done.tensor is not None:
            answer_bytes = done.tensor.numel()
        rounds.append(Carried(request.op, given_bytes, answer_bytes, element_bytes, done.traffic))
        arrived = arrived_of(request, done)


def request_of(backend: Backend, given: Round, values: torch.Tensor, key: str) -> Request:
    if given.op is Op.ALL_TO_ALL:
        return Request(Op.ALL_TO_ALL, parts=given.parts, key=key)
    if given.merger is not None and Op.MERGE in backend.capabilities.ops:
        note = describe(given.merger, values.numel(), values.dtype)
        return Request(Op.MERGE, given.parts[0], key=key, note=note)
    return Request(given.op, given.parts[0], key=key)


def arrived_of(request: Request, done: Result) -> Arrived:
    if request.op is Op.MERGE:
        assert done.tensor is not None
        return Pulled(done.tensor, done.lossless).arrived()
    if request.op is Op.ALL_REDUCE:
        assert done.tensor is not None
        return Arrived((done.tensor,))
    return Arrived(done.parts)
