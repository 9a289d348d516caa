"""A step's messages where a compressor makes their means, and how far these are from true ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from testbed.backends.protocol import Backend, Work
from testbed.base.types import Op, Request, Traffic
from testbed.control.protocol import Control
from testbed.training.compressed.channel_order import made_on
from testbed.training.compressed.driver import Conversations
from testbed.training.compressed.work import CompressedWork, Outgoing
from testbed.training.exchange.buckets import GradientBuckets
from testbed.training.exchange.reducer import GradientReducer
from testbed.training.exchange.setup import AGREE_S
from testbed.training.exchange.step_state import StepState

# A step's messages where a compressor exchanges them: the same plan, other requests.
#
# Plans in two halves: all rounds of a message run where the first half would, and are waited for
# where the second half would be, just before the layer's next forward pass. Compressed messages are
# not cut into halves: an all-gathered payload has no shard to fold.

Shapes = tuple[tuple[int, ...], ...]


class CompressedReducer(GradientReducer):
    """See `GradientReducer`; what is collected are means, not sums.

    Args:
        buckets: see `GradientReducer`, as are `backend` and `step`.
        driver: runs the compressor's rounds.
        shapes: of the tensors in each message, see `shapes_of`.
        rate: the step's learning rate, None = there is no single one.
        probe: compares means with the true ones, if the step is one of the first.

    Attributes:
        becomes_residual: see `Outgoing`.
    """

    becomes_residual = False
    held_bytes = 0  # payloads that have arrived and their mean take memory of their own

    def __init__(
        self,
        buckets: GradientBuckets,
        backend: Backend,
        step: StepState,
        *,
        driver: Conversations,
        shapes: Sequence[Shapes],
        rate: Callable[[], float | None],
        probe: ErrorProbe,
    ) -> None:
        super().__init__(buckets, backend, step)
        self._driver = driver
        self._shapes = shapes
        self._rate = rate
        self._probe = probe
        self.may_defer = not probe.is_due
        self._given: dict[int, torch.Tensor] | None = {} if probe.is_due else None

    def spread(self) -> None:
        """Nothing: all rounds run in the place of the first half."""

    def land_all(self) -> None:
        """See `GradientReducer.land_all`; then compare, if the step is one of the first."""
        super().land_all()
        given, self._given = self._given, None
        if given is not None:
            delivered = {number: self._values(number) for number in given}
            self._probe.compare(given, delivered, self._buckets.keys, self.number)

    def submit(self, request: Request) -> Work:
        """See `GradientReducer.submit`."""
        return self._driver.submit(request)

    def _values(self, number: int) -> torch.Tensor:
        return self._buffers.payload(number, self._gradients).view(-1)

    def _given_for(self, number: int) -> torch.Tensor:
        """A copy of what this rank gave for a message."""
        return self._values(number).clone()

    def _send(self, number: int) -> None:
        message, key = self._plan.messages[number], self._buckets.keys[number]
        values = self._values(number)
        if self._given is not None:
            self._given[number] = self._given_for(number)
        outgoing = Outgoing(
            values,
            self._driver.context(key, self.number, self._shapes[number], self._rate()),
            message.priority,
            message.channel,
            made_on(values.device),
            self.becomes_residual,
        )
        self._works[number] = [self._driver.begin(outgoing)]

    def land_message(self, number: int) -> None:
        """See `GradientReducer.land_message`."""
        works = self._works.get(number, ())
        super().land_message(number)
        for work in works:
            assert isinstance(work, CompressedWork)
            self._step.add_events(work.details)


# How far delivered means are from the true ones, measured in a run's first steps.


class ErrorProbe:
    """Sums the gradients of all ranks once more, uncompressed, and compares.

    Such a step is neither hidden nor measured: bytes and time are counted here, to be left out.

    Args:
        backend: carries the sums, when nothing else is under way.
        control: tells when all ranks have begun and ended, so that the bytes are those of this.
        num_workers: that a mean is over.
        num_steps: how many steps are compared.
        patience_s: how long a sum may take.

    Attributes:
        relative_errors: |delivered - true| / |true| over all messages, of each compared step.
        traffic: of comparing.
        spent_s: by comparing.
    """

    def __init__(
        self,
        backend: Backend,
        control: Control,
        num_workers: int,
        num_steps: int,
        patience_s: float,
    ) -> None:
        self.relative_errors: list[float] = []
        self.traffic = Traffic()
        self.spent_s = 0.0
        self._left = num_steps
        self._backend = backend
        self._control = control
        self._num_workers = num_workers
        self._patience_s = max(AGREE_S, patience_s)

    @property
    def is_due(self) -> bool:
        """Whether the step that begins now is compared."""
        return self._left > 0

    def compare(
        self,
        given: dict[int, torch.Tensor],
        delivered: dict[int, torch.Tensor],
        keys: Sequence[str],
        step: int,
    ) -> None:
        """Compare a step's means with the true ones.

        Args:
            given: by message, copies of this rank's values; overwritten.
            delivered: the means that the compressor has made of them.
            keys: names of the messages.
            step: its number.
        """
        self._left -= 1
        began_s = time.perf_counter()
        before = self._meet()
        wrong = true = 0.0
        for number in sorted(given):
            mean = self._sum(given.pop(number), keys[number], step) / self._num_workers
            wrong += _square(delivered[number] - mean)
            true += _square(mean)
        self.relative_errors.append((wrong / true) ** 0.5 if true else 0.0)
        self.traffic += self._meet() - before
        self.spent_s += time.perf_counter() - began_s

    def _meet(self) -> Traffic:
        """When all ranks are here, servers too have sent all that was asked of them."""
        members = self._backend.size
        self._control.all_gather("comparing means", b"", self._patience_s, members=members)
        return self._backend.traffic()

    def _sum(self, given: torch.Tensor, name: str, step: int) -> torch.Tensor:
        key = f"{name} (uncompressed)"
        work: Work = self._backend.submit(Request(Op.ALL_REDUCE, given, key=key, step=step))
        total = work.wait(self._patience_s).tensor
        assert total is not None
        return total


def _square(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
