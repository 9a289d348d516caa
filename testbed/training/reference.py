"""The single-process reference: what n workers must arrive at, computed without communication.

One process computes for all workers in turn: each worker's gradient on its own samples, with its
own buffers and random state, then the sum in rank order, divided by n, and one optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from testbed.backends.protocol import Backend
from testbed.base.config import RunConfig
from testbed.base.types import Op, Request
from testbed.training.protocol import Observer, Run, StepRecord
from testbed.training.replica import (
    Replica,
    backward,
    make_replica,
    num_steps,
    sample_order,
    update,
)
from testbed.training.sampling import SampleCursor
from testbed.training.summary import Outcome
from testbed.workloads.workload import Workload


class Verification(Observer):
    """Proves that the run did the work of a single process: equal parameters after some steps.

    Rank 0 copies its parameters after those steps, and trains alone, from the start, when the run
    has ended.

    Args:
        run: the rank's place in the job.
        model: that is trained.
        num_steps: after which to compare.
    """

    def __init__(self, run: Run, model: torch.nn.Module, num_steps: int) -> None:
        self._run = run
        self._model = model
        self._num_steps = num_steps
        self._copies: list[torch.Tensor] = []

    def reads_after(self, done: int) -> bool:
        """See `Observer.reads_after`."""
        return done == self._num_steps

    def after_step(self, record: StepRecord) -> None:
        """See `Observer.after_step`."""
        if self.reads_after(record.done) and self._run.rank == 0:
            self._copies = [p.detach().cpu().clone() for p in self._model.parameters()]

    def finish(self, outcome: Outcome) -> None:
        """See `Observer.finish`."""
        if not self._copies:
            return
        run = self._run
        run.control.state = "training alone, to compare"
        random_state = torch.get_rng_state()
        theirs = reference_parameters(run.build(), run.config, run.backend.size, self._num_steps)
        torch.set_rng_state(random_state)
        outcome.reference_steps = self._num_steps
        errors = relative_errors(self._copies, theirs)
        outcome.reference_error = max(errors)
        names = [name for name, _ in self._model.named_parameters()]
        outcome.reference_worst = names[errors.index(outcome.reference_error)]
        pairs = zip(self._copies, theirs, strict=True)
        outcome.bit_equal = all(torch.equal(a, b) for a, b in pairs)


class _VirtualWorker:
    """What each worker has of its own: buffers (batch statistics) and random state."""

    def __init__(self, model: torch.nn.Module, rank: int, seed: int) -> None:
        self.buffers = [b.detach().clone() for b in model.buffers()]
        torch.manual_seed(worker_seed(seed, rank))
        self.random_state = torch.get_rng_state()

    def enter(self, model: torch.nn.Module) -> None:
        for buffer, own in zip(model.buffers(), self.buffers, strict=True):
            buffer.copy_(own)
        torch.set_rng_state(self.random_state)

    def leave(self, model: torch.nn.Module) -> None:
        self.buffers = [b.detach().clone() for b in model.buffers()]
        self.random_state = torch.get_rng_state()


def worker_seed(seed: int, rank: int) -> int:
    """Seed of one worker's own randomness (dropout), after the model was built from `seed`."""
    return seed * 1_000_003 + rank + 1


def reference_parameters(
    workload: Workload, config: RunConfig, num_workers: int, steps: int
) -> list[torch.Tensor]:
    """Parameters after `steps` steps of `num_workers` workers.

    Args:
        workload: built anew under the run's seed.
        config: the run's configuration.
        num_workers: n.
        steps: how many steps to take.
    """
    if workload.for_values is not None:
        workload.for_values()
    order = sample_order(config, workload, num_workers)
    replica = make_replica(workload, config, num_steps(config, order), plain=True)
    replica.model.train()
    cursors = [SampleCursor(order, rank) for rank in range(num_workers)]
    workers = [_VirtualWorker(replica.model, rank, config.seed) for rank in range(num_workers)]
    for step in range(steps):
        gradients = []
        for worker, cursor in zip(workers, cursors, strict=True):
            worker.enter(replica.model)
            backward(replica, cursor.indices(step), config.accumulate)
            worker.leave(replica.model)
            gradients.append([p.grad for p in replica.model.parameters()])
            replica.optimizer.zero_grad(set_to_none=True)
        _set_means(replica, gradients)
        update(replica, config.clip_norm)
    return [p.detach().cpu().clone() for p in replica.model.parameters()]


def _set_means(replica: Replica, gradients: Sequence[Sequence[torch.Tensor | None]]) -> None:
    for parameter, ranks in zip(
        replica.model.parameters(), zip(*gradients, strict=True), strict=True
    ):
        if all(g is None for g in ranks):
            continue
        total = torch.zeros_like(parameter)
        for gradient in ranks:
            if gradient is not None:
                total += gradient
        parameter.grad = total.div_(float(len(ranks)))


def relative_errors(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> list[float]:
    """Relative difference of each tensor, in the 2-norm: ||a - b|| / ||b||; NaN counts as infinite.

    Example:
        >>> relative_errors([torch.ones(4), torch.tensor([1.5])], [torch.ones(4), torch.ones(1)])
        [0.0, 0.5]
    """
    errors = []
    for a, b in zip(ours, theirs, strict=True):
        error = float((a.double() - b.double()).norm()) / max(float(b.double().norm()), 1e-300)
        errors.append(math.inf if math.isnan(error) else error)
    return errors


# The naive twin of the session: backward, then one blocking exchange per parameter.


def average_gradients(model: torch.nn.Module, backend: Backend, step: int) -> None:
    """Replace every gradient by its mean over the workers, one after the other.

    A parameter that some rank did not use must be used by all here: the twin is plain on purpose.
    """
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.contiguous()
            backend.submit(Request(Op.ALL_REDUCE, gradient, key=name, step=step)).wait()
            parameter.grad = gradient.div_(float(backend.size))
