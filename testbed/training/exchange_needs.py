"""What exchanging holds and needs, before anything runs; a compressor's needs are measured."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import torch

from testbed.base.plan import Plan
from testbed.compression.common import num_bytes
from testbed.compression.protocol import Arrived, Context, State, feeds_back
from testbed.compression.protocol import Exchanged as Ended
from testbed.memory.planning.gradients import row_of
from testbed.memory.planning.lifetimes import Costs, Lifetimes
from testbed.memory.recording.record import Peak
from testbed.memory.running.arena import ArenaPlan, is_bounded, place_buckets
from testbed.memory.strategy import Mirror
from testbed.training.compressed.spec import Compression
from testbed.training.replica import Replica

SAMPLE_ELEMENTS: Final = 1 << 20
"""Of the largest message that is measured. Scans are bounded far below that, so that what larger
ones need beside them is proportional to their size."""


@dataclass(frozen=True)
class Need:
    """Bytes that the exchange of one message takes, beside its values.

    Attributes:
        kept: between steps.
        scratch: at most at once, from the first round to the mean; payloads of others included.
        mean: of its mean, where that has memory of its own.
        is_sparse: the mean is a list of elements.
    """

    kept: float
    scratch: float
    mean: float
    is_sparse: bool


class CodecNeeds:
    """What messages take, by their size.

    Args:
        compression: of the messages.
        element_bytes: of their values.
        num_workers: that exchange.
        becomes_residual: values join what is kept, means have their own memory (see `Outgoing`).
    """

    def __init__(
        self,
        compression: Compression,
        element_bytes: int,
        num_workers: int,
        *,
        becomes_residual: bool,
    ) -> None:
        self._compressor = compression.compressor
        self._dtype = {8: torch.float64, 2: torch.bfloat16}.get(element_bytes, torch.float32)
        self._num_workers = num_workers
        self._becomes_residual = becomes_residual
        self._measured = functools.cache(self._measure)

    def of(self, num_elements: int) -> Need:
        """Of a message of so many elements."""
        if num_elements <= SAMPLE_ELEMENTS:
            return self._measured(num_elements)
        most, half = self._measured(SAMPLE_ELEMENTS), self._measured(SAMPLE_ELEMENTS // 2)
        more = 2 * (num_elements / SAMPLE_ELEMENTS - 1.0)

        def at(large: float, small: float) -> float:
            return large + more * (large - small)

        return Need(
            at(most.kept, half.kept),
            at(most.scratch, half.scratch),
            at(most.mean, half.mean),
            most.is_sparse,
        )

    def _measure(self, num_elements: int) -> Need:
        draw = torch.Generator().manual_seed(num_elements)
        values = torch.randn(num_elements, generator=draw).to(self._dtype)
        state: State = {}
        for step in range(2):  # the first one makes the state
            watch = Peak([values, *state.values()])
            with watch, torch.no_grad():
                done, arriving = self._exchange(values, state, step)
            state = done.state
        mean = done.mean
        is_sparse = mean.is_sparse
        held = (mean._indices(), mean._values()) if is_sparse else (mean,)
        own = sum(part.nbytes for part in held if mean is not values)
        return Need(num_bytes(state), watch.peak_bytes + arriving, own, is_sparse)

    def _exchange(self, values: torch.Tensor, state: State, step: int) -> tuple[Ended, int]:
        """One exchange of a worker, the others sending the same; the bytes that come from them."""
        context = Context(step=step, learning_rate=0.1)
        compressor = self._compressor
        if self._becomes_residual and feeds_back(compressor):
            conversation = compressor.send(values, state, replace(context, sparse=True))
        else:
            conversation = compressor.exchange(values, state, replace(context, out=values))
        others = self._num_workers - 1
        arriving = 0
        given = next(conversation)
        while True:
            arriving += others * given.num_bytes
            parts = given.parts if given.merger is None else given.parts * self._num_workers
            try:
                given = conversation.send(Arrived(parts))
            except StopIteration as stop:
                return stop.value, arriving


def compressed(
    lifetimes: Lifetimes,
    mirror: Mirror | None,
    exchanged: Exchanged,
    compression: Compression,
    num_workers: int,
    costs: Costs,
) -> tuple[int, Costs]:
    """What a compressor keeps on the device, and the costs with what its exchange needs."""
    width, share = exchanged.element_bytes, lifetimes.update_share
    slice_bytes = lifetimes.update_slice_bytes
    needs = CodecNeeds(compression, width, num_workers, becomes_residual=mirror is not None)
    kept, needed = 0.0, dict.fromkeys((g.name for g in lifetimes.gradients), 0.0)
    for names, size in exchanged.messages:
        need = needs.of(size)
        # A gradient joins what is kept, and the mean has memory of its own until it is used.
        at_once = min(size * width, slice_bytes or size * width)
        used = need.mean + at_once * (need.is_sparse + share)
        kept += need.kept
        at = [name for name in needed if name in names]
        if at:  # the last gradient completes the message
            needed[at[-1]] += max(need.scratch, used if mirror is not None else 0.0)
    costs = msgspec.structs.replace(costs, exchange_bytes=tuple(map(round, needed.values())))
    if mirror is None:
        return round(kept), costs
    at_once = costs.in_flight or 1
    if mirror.where == "device":
        return round(kept), msgspec.structs.replace(costs, in_flight=0, exchanges_at_once=at_once)
    row = row_of(at_once) if exchanged.is_early else 0
    in_flight = at_once if exchanged.is_early else None
    return 0, msgspec.structs.replace(
        costs, in_flight=in_flight, row=row, exchanges_at_once=at_once
    )


@dataclass(frozen=True)
class Exchanged:
    """What exchanging holds, as far as it can be told before a session is open.

    Attributes:
        held_bytes: of buckets.
        arena: where released buckets lie; None: there are none.
        in_flight: gradients alive at once if they are released; None: all of them stay.
        messages: names of the tensors in each message, and its elements.
        element_bytes: of the gradients.
        is_early: means arrive during the backward pass.
        travels: gradients are compressed or sent.
    """

    held_bytes: int
    in_flight: int | None
    messages: tuple[tuple[frozenset[str], int], ...]
    element_bytes: int
    is_early: bool = True
    arena: ArenaPlan | None = None
    travels: bool = True

    @classmethod
    def of(
        cls, replica: Replica, plan: Plan | None, num_workers: int, compressed: bool
    ) -> Exchanged:
        """From the plan of a run; None: one message for each tensor."""
        named = [(n, p) for n, p in replica.model.named_parameters() if p.requires_grad]
        element_bytes = named[0][1].element_size()
        release = replica.strategy.release
        travels = num_workers > 1 or compressed
        if plan is None:
            messages = [(frozenset({name}), p.numel()) for name, p in named]
            held_bytes = 0
        else:
            messages = [
                (
                    frozenset(plan.names[part.tensor] for part in message.parts),
                    sum(part.stop - part.start for part in message.parts),
                )
                for message in plan.messages
            ]
            fused = (
                m[1] for m, each in zip(messages, plan.messages, strict=True) if each.parts[1:]
            )
            held_bytes = sum(fused) * element_bytes
        is_early = plan is None or is_bounded(plan)
        in_flight = None if release is None else release.in_flight
        arena = None
        if not travels or replica.strategy.mirror is not None:
            held_bytes = 0 if in_flight is not None else held_bytes
        elif in_flight is not None and is_early and plan is not None:
            arena = place_buckets(plan, in_flight)
            held_bytes = arena.num_bytes
        if in_flight is not None and not travels:
            in_flight = 0
        return cls(held_bytes, in_flight, tuple(messages), element_bytes, is_early, arena, travels)
