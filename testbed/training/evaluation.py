"""Test accuracy, from copies of the model that the training loop did not stop for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from testbed.records.cell import Accuracy
from testbed.training.protocol import Observer, Run, StepRecord
from testbed.training.replica import Replica
from testbed.training.summary import Outcome

SNAPSHOT_BUDGET_BYTES = 512 << 20


@dataclass(frozen=True)
class Snapshot:
    """The model after so many steps and so much training time."""

    step: int
    time_s: float
    tensors: tuple[torch.Tensor, ...]


class Evaluation(Observer):
    """Test accuracy in the course of the training, and at its end; on rank 0.

    Evaluating while the others train would make them wait (or, with asynchronous servers, run
    ahead); so rank 0 only copies the model, and evaluates after the run. Copies that would exceed
    a budget of memory are not made.

    Args:
        run: the rank's place in the job.
        replica: that is trained.
        every: steps from one copy to the next.
    """

    def __init__(self, run: Run, replica: Replica, every: int) -> None:
        self._run = run
        self._replica = replica
        self._tensors = [*replica.model.parameters(), *replica.model.buffers()]
        self._every = every
        size_bytes = sum(t.numel() * t.element_size() for t in self._tensors)
        self._left = SNAPSHOT_BUDGET_BYTES // size_bytes
        self._snapshots: list[Snapshot] = []

    def reads_after(self, done: int) -> bool:
        """See `Observer.reads_after`."""
        concerned = self._run.rank == 0 or self._run.in_step
        return concerned and self._left > 0 and done % self._every == 0

    def after_step(self, record: StepRecord) -> None:
        """See `Observer.after_step`."""
        if not self.reads_after(record.done):
            return
        self._left -= 1
        if self._run.rank == 0:
            copies = tuple(t.detach().clone() for t in self._tensors)
            self._snapshots.append(Snapshot(record.done, record.time_s, copies))

    def finish(self, outcome: Outcome) -> None:
        """See `Observer.finish`."""
        if self._run.rank != 0:
            return
        self._run.control.state = "evaluating"
        for snapshot in self._snapshots:
            judged = self._judged(snapshot)
            if judged is not None:
                outcome.accuracy_curve.append(judged)
        outcome.test_accuracy = accuracy_of(self._replica)

    def _judged(self, snapshot: Snapshot) -> Accuracy | None:
        """The model as it was; the model is left as it was found."""
        kept = tuple(t.detach().clone() for t in self._tensors)
        with torch.no_grad():
            _copy(self._tensors, snapshot.tensors)
            accuracy = accuracy_of(self._replica)
            loss = loss_of(self._replica) if self._run.config.target_loss else None
            _copy(self._tensors, kept)
        if accuracy is None and loss is None:
            return None
        return Accuracy(step=snapshot.step, time_s=snapshot.time_s, accuracy=accuracy, loss=loss)


def accuracy_of(replica: Replica) -> float | None:
    """Share of the test samples that the model gets right; None where nothing tells."""
    return _mean_over_test(replica, replica.workload.num_correct)


def loss_of(replica: Replica) -> float | None:
    """Mean loss of the test samples; None without any."""
    loss = replica.workload.loss
    assert loss is not None
    return _mean_over_test(replica, lambda model, b: float(loss(model, b)) * len(b[0]))


def _mean_over_test(
    replica: Replica,
    total: Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], float | None] | None,
    batch_size: int = 256,
) -> float | None:
    """The model's `total` over all batches of test samples, divided by their number."""
    test = replica.workload.test
    if test is None or len(test) == 0:
        return None
    assert total is not None
    was_training = replica.model.training
    replica.model.eval()
    found, each = 0.0, None
    with torch.no_grad():
        for start in range(0, len(test), batch_size):
            chosen = range(start, min(start + batch_size, len(test)))
            each = total(replica.model, replica.to_device(test.batch(chosen)))
            if each is None:
                break
            found += each
    replica.model.train(was_training)
    return None if each is None else found / len(test)


def _copy(into: list[torch.Tensor], source: tuple[torch.Tensor, ...]) -> None:
    for tensor, value in zip(into, source, strict=True):
        tensor.copy_(value)
