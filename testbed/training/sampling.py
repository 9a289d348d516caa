"""Which samples each worker sees in each step: a pure function of seed and step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from testbed.base.errors import UsageError


@dataclass(frozen=True)
class SampleOrder:
    """The global order of samples, shared out to workers.

    Every epoch is one seeded permutation. Step t of an epoch takes the next `num_workers *
    batch_size` of them; worker r gets the r-th block. What does not fill a step is left out.

    Attributes:
        num_samples: size of the data set.
        num_workers: n.
        batch_size: samples per worker and step (all accumulated micro-batches together).
        seed: of the run.
    """

    num_samples: int
    num_workers: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.steps_per_epoch < 1:
            raise UsageError(
                f"{self.num_workers} workers x {self.batch_size} samples need "
                f"{self.num_workers * self.batch_size} samples a step, but the data set has "
                f"{self.num_samples}; lower --batch-size or --workers"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Full steps in one epoch."""
        return self.num_samples // (self.num_workers * self.batch_size)

    def permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        """The order of one epoch."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)

    def indices(self, step: int, rank: int) -> npt.NDArray[np.int64]:
        """The samples of worker `rank` in step `step`, counted from the start of training."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = (within * self.num_workers + rank) * self.batch_size
        return self.permutation(epoch)[start : start + self.batch_size]


class SampleCursor:
    """Walks through one worker's samples; remembers the current epoch's permutation."""

    def __init__(self, order: SampleOrder, rank: int) -> None:
        self._order = order
        self._rank = rank
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """Equal to `SampleOrder.indices`, without drawing the permutation anew."""
        order = self._order
        epoch, within = divmod(step, order.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, order.permutation(epoch)
        start = (within * order.num_workers + self._rank) * order.batch_size
        return self._permutation[start : start + order.batch_size]


# Digests that prove equal work: of tensors, of sample indices, of what ranks must agree on.


def digest_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 over shapes, dtypes and bytes, in order; equal only if all bits are.

    Example:
        >>> digest_tensors([torch.zeros(2)]) == digest_tensors([torch.zeros(2)])
        True
    """
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        plain = tensor.detach().cpu().contiguous().view(-1)
        state.update(plain.view(torch.uint8).numpy().data if plain.numel() else b"")
    return state.hexdigest()


def describe_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """One line per tensor with all that ranks must agree on before training."""
    return [f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in named]


class RunningDigest:
    """A chain of digests, h <- SHA-256(h || data): its value is its whole state, so it can resume.

    Args:
        value: where to go on; empty = from the start.
    """

    def __init__(self, value: str = "") -> None:
        self.value = value

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self.value = hashlib.sha256(bytes.fromhex(self.value) + data).hexdigest()
