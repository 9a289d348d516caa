"""Test accuracy, from snapshots that the training loop took without stopping for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from testbed.training.replica import Replica

SNAPSHOT_BUDGET_BYTES = 512 << 20


@dataclass(frozen=True)
class Snapshot:
    """The model after so many steps and so much training time."""

    step: int
    time_s: float
    tensors: tuple[torch.Tensor, ...]


class Snapshots:
    """Copies of the model at evaluation points.

    Evaluating while the others train would make them wait (or, with asynchronous servers, run
    ahead); so rank 0 only copies, and evaluates after the run. Copies are bounded in memory: the
    ones that would exceed the budget are not taken, `due` says so beforehand.
    """

    def __init__(self, model: torch.nn.Module, every: int | None) -> None:
        self._tensors = [*model.parameters(), *model.buffers()]
        self._every = every
        self._size_bytes = sum(t.numel() * t.element_size() for t in self._tensors)
        self.taken: list[Snapshot] = []

    def due(self, step: int) -> bool:
        """Whether a copy belongs after this many steps, and fits."""
        fits = (len(self.taken) + 1) * self._size_bytes <= SNAPSHOT_BUDGET_BYTES
        return self._every is not None and step % self._every == 0 and fits

    def take(self, step: int, time_s: float) -> None:
        """Copy the model."""
        copies = tuple(t.detach().clone() for t in self._tensors)
        self.taken.append(Snapshot(step, time_s, copies))


def accuracy_of(replica: Replica, batch_size: int = 256) -> float | None:
    """Share of the test samples that the model gets right; None without test samples."""
    test = replica.workload.test
    if test is None or len(test) == 0:
        return None
    assert replica.workload.num_correct is not None
    was_training = replica.model.training
    replica.model.eval()
    correct = 0
    with torch.no_grad():
        for start in range(0, len(test), batch_size):
            chosen = range(start, min(start + batch_size, len(test)))
            batch = replica.to_device(test.batch(chosen))
            correct += replica.workload.num_correct(replica.model, batch)
    replica.model.train(was_training)
    return correct / len(test)


def accuracy_at(replica: Replica, snapshot: Snapshot) -> float | None:
    """Accuracy of the model as it was; the model is left as it was found."""
    tensors = [*replica.model.parameters(), *replica.model.buffers()]
    kept = [t.detach().clone() for t in tensors]
    with torch.no_grad():
        _copy(tensors, snapshot.tensors)
        accuracy = accuracy_of(replica)
        _copy(tensors, kept)
    return accuracy


def _copy(into: list[torch.Tensor], source: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> None:
    for tensor, value in zip(into, source, strict=True):
        tensor.copy_(value)
