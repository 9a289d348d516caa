"""A step's messages where a compressor carries them: the same plan, conversations instead of sums.

Plans in two halves: the whole conversation runs where the first half would, and is waited for where
the second half would be, just before the layer's next forward. Compressed messages are not cut into
halves: a gathered payload has no shard to fold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from testbed.backends.protocol import Backend, Work
from testbed.base.plan import Message, Plan
from testbed.base.types import Op, Request, Traffic
from testbed.control.protocol import Control
from testbed.training.compressed.channel_order import made_on
from testbed.training.compressed.driver import Conversations
from testbed.training.compressed.work import Outgoing
from testbed.training.exchange.buckets import GradientBuckets
from testbed.training.exchange.reducer import GradientReducer
from testbed.training.exchange.setup import AGREE_S

Shapes = tuple[tuple[int, ...], ...]


class CompressedFlight(GradientReducer):
    """See `GradientReducer`; what is collected are means, not sums.

    Args:
        plan: see `GradientReducer`, as are `fusion`, `keys`, `backend` and `step`.
        conversations: carry the messages.
        shapes: of the tensors in each message, see `shapes_of`.
        rate: the step's learning rate, None = there is no single one.
        keeps: copies of what this rank gave, by message; None = nobody will ask.
    """

    def __init__(
        self,
        plan: Plan,
        fusion: GradientBuckets,
        keys: Sequence[str],
        backend: Backend,
        step: int,
        *,
        conversations: Conversations,
        shapes: Sequence[Shapes],
        rate: Callable[[], float | None],
        keeps: dict[int, torch.Tensor] | None,
    ) -> None:
        super().__init__(plan, fusion, keys, backend, step, None)
        self._conversations = conversations
        self._shapes = shapes
        self._rate = rate
        self.kept = keeps

    def spread(self) -> None:
        """Nothing: the first half was the whole."""

    def delivered(self, number: int) -> torch.Tensor:
        """The mean of a message that has landed."""
        return self._fusion.payload(number, self._gradients).view(-1)

    def _send(self, number: int) -> None:
        message = self._plan.messages[number]
        values = self._fusion.payload(number, self._gradients).view(-1)
        if self.kept is not None:
            self.kept[number] = values.clone()
        outgoing = Outgoing(
            values,
            self._conversations.context(
                self._keys[number], self._step, self._shapes[number], self._rate()
            ),
            message.priority,
            message.channel,
            made_on(values.device),
        )
        self._works.setdefault(number, []).append(self._conversations.begin(outgoing))


def shapes_of(plan: Plan, parameters: Sequence[torch.Tensor]) -> list[Shapes]:
    """For each message the shapes of its parts: a whole tensor's own, a slice has one dimension.

    Example:
        >>> from testbed.base.plan import TensorSlice
        >>> plan = Plan(scheduler="x", names=("a",), num_elements=(6,), dtypes=("float32",),
        ...             messages=(Message(parts=(TensorSlice(0, 0, 6),)),
        ...                       Message(parts=(TensorSlice(0, 0, 4),))))
        >>> shapes_of(plan, [torch.zeros(2, 3)])
        [((2, 3),), ((4,),)]
    """
    return [_shapes(message, parameters) for message in plan.messages]


def _shapes(message: Message, parameters: Sequence[torch.Tensor]) -> Shapes:
    found = []
    for part in message.parts:
        parameter, length = parameters[part.tensor], part.stop - part.start
        whole = length == parameter.numel() and parameter.dim() > 0
        found.append(tuple(parameter.shape) if whole else (length,))
    return tuple(found)


# How far delivered means are from the true ones, measured in a run's first steps.


class Comparison:
    """Sums what the ranks gave once more, uncompressed, and compares.

    Such a step is neither hidden nor measured: the bytes are counted here, to be left out.

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
    def due(self) -> bool:
        """Whether the step under way is compared."""
        return self._left > 0

    def compare(self, flight: CompressedFlight, keys: Sequence[str], step: int) -> None:
        """Compare a step's means, all of which have landed; nothing once enough were."""
        if flight.kept is None:
            return
        self._left -= 1
        began_s = time.perf_counter()
        before = self._meet()
        wrong = true = 0.0
        for number in sorted(flight.kept):
            mean = self._sum(flight.kept.pop(number), keys[number], step) / self._num_workers
            wrong += _square(flight.delivered(number) - mean)
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
