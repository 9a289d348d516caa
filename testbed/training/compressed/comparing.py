"""How far delivered means are from the true ones, measured in a run's first steps."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from testbed.backends.protocol import Backend, Work
from testbed.control.protocol import Control
from testbed.nouns import Request, Traffic, Verb
from testbed.training.agreement import AGREE_S
from testbed.training.compressed.flight import CompressedFlight


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
        work: Work = self._backend.submit(Request(Verb.SUM, given, key=key, step=step))
        total = work.wait(self._patience_s).tensor
        assert total is not None
        return total


def _square(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
