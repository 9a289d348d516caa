"""The single-process reference: what n workers must arrive at, computed without communication.

One process computes for all workers in turn: each worker's gradient on its own samples, with its
own buffers and random state, then the sum in rank order, divided by n, and one optimizer step.
Where a compressor makes the means, `compression.lockstep` takes the place of the sum: the same
messages in the same conversations, one after another, with the states of all workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from testbed.backends.protocol import Backend
from testbed.base.config import RunConfig
from testbed.base.plan import Message, Plan
from testbed.base.types import Capabilities, Op, Request
from testbed.compression.lockstep import Lockstep, MergingServers
from testbed.compression.protocol import State
from testbed.training.compressed.engine import shapes_of
from testbed.training.compressed.spec import Compression, compressors_of
from testbed.training.compressed.state import carried
from testbed.training.evidence import ContentDigest, Sketch, sketch_of
from testbed.training.exchange.buckets import describe_messages
from testbed.training.optimizers import shared_learning_rate
from testbed.training.protocol import Observer, Run, StepRecord
from testbed.training.replica import (
    Replica,
    backward,
    make_replica,
    num_steps,
    random_state,
    sample_order,
    set_random_state,
    update,
)
from testbed.training.sampling import SampleCursor
from testbed.training.summary import Outcome
from testbed.workloads.workload import Workload


class Verification(Observer):
    """Proves that the run did the work of a single process: equal parameters after some steps.

    Rank 0 copies its parameters after those steps, and trains alone, from the start, when the run
    has ended. Each rank tells what its samples held in those steps, and its buffers after the
    first one: later ones are not everybody's own where a framework shares rank 0's.

    Args:
        run: the rank's place in the job.
        model: that is trained.
        num_steps: after which to compare.
        content: of this rank's samples so far.
        compressing: what makes the means; None: they are sums, divided.
    """

    def __init__(
        self,
        run: Run,
        model: torch.nn.Module,
        num_steps: int,
        content: ContentDigest,
        compressing: Compressing | None = None,
    ) -> None:
        self._run = run
        self._model = model
        self._content = content
        self._seen = ""
        self._buffers: Sketch = []
        self._num_steps = num_steps
        self._compressing = compressing
        self._plans = [] if compressing is None else [compressing.plan()]
        self._copies: list[torch.Tensor] = []

    def reads_after(self, done: int) -> bool:
        """See `Observer.reads_after`."""
        return done == self._num_steps

    def after_step(self, record: StepRecord) -> None:
        """See `Observer.after_step`."""
        if self._compressing is not None and record.done < self._num_steps:
            self._plans.append(self._compressing.plan())
        if record.done == 1:
            self._buffers = sketch_of(self._model)
        if self.reads_after(record.done):
            self._seen = self._content.value
        if self.reads_after(record.done) and self._run.rank == 0:
            self._copies = [p.detach().cpu().clone() for p in self._model.parameters()]

    def finish(self, outcome: Outcome) -> None:
        """See `Observer.finish`."""
        outcome.verified_content, outcome.first_buffers = self._seen, self._buffers
        if not self._copies:
            return
        run, compressing = self._run, self._compressing
        run.control.state = "training alone, to compare"
        device = next(self._model.parameters()).device
        kept = random_state(device)
        num_workers, made = run.backend.size, None
        if compressing is not None:
            made = CompressedMeans(
                *(compressing.compression, run.backend.capabilities, num_workers, self._plans)
            )
        reference = reference_of(run.build(), run.config, num_workers, self._num_steps, made)
        theirs = reference.parameters
        outcome.reference_contents = [content.value for content in reference.contents]
        outcome.reference_buffers = reference.buffers
        set_random_state(device, kept)
        if compressing is not None and made is not None:
            outcome.reference_slack = max(compressing.slack, made.slack)
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
        self._device = next(model.parameters()).device
        torch.manual_seed(worker_seed(seed, rank))
        self.random_state = random_state(self._device)

    def enter(self, model: torch.nn.Module) -> None:
        for buffer, own in zip(model.buffers(), self.buffers, strict=True):
            buffer.copy_(own)
        set_random_state(self._device, self.random_state)

    def leave(self, model: torch.nn.Module) -> None:
        self.buffers = [b.detach().clone() for b in model.buffers()]
        self.random_state = random_state(self._device)


def worker_seed(seed: int, rank: int) -> int:
    """Seed of one worker's own randomness (dropout), after the model was built from `seed`."""
    return seed * 1_000_003 + rank + 1


Gradients = Sequence[torch.Tensor | None]
"""Of one worker, in the order of the model's parameters."""


class Means(Protocol):
    """Gives a replica's parameters the means of all workers' gradients, one step after another."""

    def add(self, gradients: Gradients) -> None:
        """What the next worker, in rank order, computed in this step."""
        ...

    def set(self, replica: Replica, step: int) -> None:
        """Give the parameters the means of what was added, and forget it."""
        ...


class SummedMeans:
    """See `Means`: sums in rank order over n; beside them one worker's gradients are held."""

    def __init__(self) -> None:
        self._num_workers = 0
        self._sums: list[torch.Tensor | None] = []

    def add(self, gradients: Gradients) -> None:
        """See `Means.add`."""
        self._num_workers += 1
        self._sums = self._sums or [None] * len(gradients)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                total = self._sums[i]
                if total is None:
                    total = self._sums[i] = torch.zeros_like(gradient)
                total += gradient

    def set(self, replica: Replica, step: int) -> None:
        """See `Means.set`."""
        for parameter, total in zip(replica.model.parameters(), self._sums, strict=True):
            parameter.grad = None if total is None else total.div_(float(self._num_workers))
        self._num_workers, self._sums = 0, []


@dataclass(frozen=True)
class Reference:
    """What one process arrives at that computes for all workers.

    Attributes:
        parameters: in the end.
        buffers: of each worker after its first step.
        contents: digest of what each worker's samples held.
    """

    parameters: list[torch.Tensor]
    buffers: list[Sketch]
    contents: list[ContentDigest]


def reference_of(
    workload: Workload,
    config: RunConfig,
    num_workers: int,
    steps: int,
    means: Means | None = None,
) -> Reference:
    """What `num_workers` workers arrive at after `steps` steps.

    Args:
        workload: built anew under the run's seed.
        config: the run's configuration.
        num_workers: n.
        steps: how many steps to take.
        means: makes them; None: sums in rank order, divided.
    """
    if workload.for_values is not None:
        workload.for_values()
    order = sample_order(config, workload, num_workers)
    replica = make_replica(workload, config, num_steps(config, order), plain=True)
    replica.model.train()
    cursors = [SampleCursor(order, rank) for rank in range(num_workers)]
    workers = [_VirtualWorker(replica.model, rank, config.seed) for rank in range(num_workers)]
    contents = [ContentDigest() for _ in workers]
    buffers: list[Sketch] = []
    means = means or SummedMeans()
    for step in range(steps):
        for worker, cursor, content in zip(workers, cursors, contents, strict=True):
            worker.enter(replica.model)
            backward(replica, cursor.indices(step), config.accumulate, see=content.see)
            if step == 0:
                buffers.append(sketch_of(replica.model))
            worker.leave(replica.model)
            means.add([p.grad for p in replica.model.parameters()])
            replica.optimizer.zero_grad(set_to_none=True)
        means.set(replica, step)
        update(replica, config.clip_norm)
    parameters = [p.detach().cpu().clone() for p in replica.model.parameters()]
    return Reference(parameters, buffers, contents)


# Means that a compressor makes.

# Where the mirror adds a gradient to what was not sent before it multiplies, a rounding may turn
# the choice of an element, whose update is then late by a step or more: of one in 1e7 elements.
MIRROR_SLACK = 1e-3


@dataclass(frozen=True)
class Compressing:
    """How the run makes its means.

    Attributes:
        compression: the compressor.
        plan: tells the plan of the step that comes next.
        slack: see `Outcome.reference_slack`.
    """

    compression: Compression
    plan: Callable[[], Plan]
    slack: float = 0.0


class CompressedMeans:
    """See `Means`: the run's messages, exchanged in one thread.

    Args:
        compression: the compressor.
        capabilities: of the run's backend: whether its servers merge, and how.
        num_workers: n.
        plans: of each step.

    Raises:
        UsageError: see `compressors_of`.
    """

    def __init__(
        self,
        compression: Compression,
        capabilities: Capabilities,
        num_workers: int,
        plans: Sequence[Plan],
    ) -> None:
        self._compression = compression
        self._num_workers = num_workers
        self._plans = plans
        self._plan: Plan | None = None
        self._gradients: list[Gradients] = []
        self._jobs: list[Lockstep] = []
        self._may_be_unused = True  # as the session: later only if the first step has shown some
        self._servers: MergingServers | None = None
        if Op.MERGE in capabilities.ops:
            self._servers = MergingServers(capabilities.num_mergers, capabilities.repacks)

    @property
    def slack(self) -> float:
        """By how much sums in another order may differ: a rounding of the dtype they travel in."""
        dtypes = {dtype for job in self._jobs for dtype in job.sum_dtypes}
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)

    def add(self, gradients: Gradients) -> None:
        """See `Means.add`."""
        self._gradients.append(gradients)

    def set(self, replica: Replica, step: int) -> None:
        """See `Means.set`."""
        named = dict(replica.model.named_parameters())
        plan = self._plans[step]
        tensors = [named[name] for name in plan.names]
        if plan != self._plan:
            self._adopt(plan, tensors)
        place = {name: i for i, name in enumerate(named)}
        given = [[of_rank[place[name]] for name in plan.names] for of_rank in self._gradients]
        self._gradients = []
        means = [torch.zeros(t.numel(), dtype=t.dtype, device=t.device) for t in tensors]
        rate = shared_learning_rate(replica.optimizer)
        for job, message in zip(self._jobs, plan.messages, strict=True):
            job.step = step
            values = [_values(message, of_rank, tensors) for of_rank in given]
            mean = job.exchange(values, rate)[0].mean
            offset = 0
            for part in message.parts:
                end = offset + part.stop - part.start
                means[part.tensor][part.start : part.stop] = mean[offset:end]
                offset = end
        for number, (tensor, mean) in enumerate(zip(tensors, means, strict=True)):
            unused = all(of_rank[number] is None for of_rank in given) and not mean.any()
            is_left = unused and self._may_be_unused
            tensor.grad = None if is_left else mean.view_as(tensor)
        if step == 0:
            self._may_be_unused = any(g is None for of_rank in given for g in of_rank)

    def _adopt(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> None:
        keys = describe_messages(plan)
        states: list[dict[str, State]] = [{} for _ in range(self._num_workers)]
        for job in self._jobs:
            for of_rank, state in zip(states, job.states, strict=True):
                of_rank[job.key] = state
        if self._plan is not None:
            old = self._plan, [job.key for job in self._jobs]
            states = [carried(of_rank, *old, plan, keys) for of_rank in states]
        compressors = compressors_of(self._compression, plan, keys)
        self._jobs = [
            Lockstep(
                *(compressors[key], self._num_workers, self._compression.seed, shapes, key),
                servers=self._servers,
                states=[of_rank.get(key, {}) for of_rank in states],
            )
            for key, shapes in zip(keys, shapes_of(plan, tensors), strict=True)
        ]
        self._plan = plan


def _values(message: Message, gradients: Gradients, like: Sequence[torch.Tensor]) -> torch.Tensor:
    """A message [n] of one worker; what it did not use is 0."""
    flat = []
    for part in message.parts:
        gradient = gradients[part.tensor]
        whole = torch.zeros_like(like[part.tensor]) if gradient is None else gradient
        flat.append(whole.reshape(-1)[part.start : part.stop])
    return torch.cat(flat)


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
