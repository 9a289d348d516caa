"""One replica of a workload's training state: everything that a step reads and writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from testbed.base.axes import MEMORY
from testbed.base.config import Precision, RunConfig
from testbed.base.errors import UsageError
from testbed.base.recorder import Recorder
from testbed.memory.strategy import KEEP_ALL, Strategy, combined, why_no_mirror
from testbed.training.compressed.spec import compression_of
from testbed.training.optimizers import OptimizerSettings, make_optimizer, make_schedule
from testbed.training.sampling import SampleOrder
from testbed.workloads.workload import Workload

DEFAULT_STEPS = 100
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Activations(Protocol):
    """What becomes of activations (see `memory.running.engine`)."""

    def forward(self) -> AbstractContextManager[None]:
        """Around a forward pass with its loss."""
        ...


@dataclass
class Replica:
    """A model with its optimizer, schedule and data, ready for its first step.

    `called` is what the loss calls instead of the model, where a framework has wrapped it;
    `activations` carries out a plan for what the forward pass leaves for the backward pass;
    `recorder` is told when either began and ended; `accumulates`: a step has several micro-batches.
    """

    workload: Workload
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler | None
    device: torch.device
    precision: Precision
    strategy: Strategy = KEEP_ALL
    called: torch.nn.Module | None = None
    activations: Activations | None = None
    recorder: Recorder | None = None
    accumulates: bool = False

    def to_device(self, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The batch on the replica's device, floating inputs in its precision."""
        double = self.precision == "float64"
        return tuple(
            t.to(self.device, dtype=torch.float64 if double and t.is_floating_point() else t.dtype)
            for t in batch
        )

    def loss(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Forward pass and loss, under autocast for the mixed precisions."""
        assert self.workload.loss is not None
        kept = nullcontext() if self.activations is None else self.activations.forward()
        with kept, self.autocast():
            return self.workload.loss(self.called or self.model, batch)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Around a forward pass: mixed precision, if it is wanted."""
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        if half is None:
            yield
        else:
            with torch.autocast(self.device.type, dtype=half):
                yield


def make_replica(
    workload: Workload, config: RunConfig, total_steps: int, plain: bool = False
) -> Replica:
    """Put a freshly built workload on its device, with optimizer and schedule.

    Args:
        workload: its model is moved, unless it was built without values, on the device `meta`.
        config: of the run.
        total_steps: of the learning rate's schedule.
        plain: leave out the parts that are put on a model, as what others are compared with does.

    Raises:
        UsageError: a precision that the device lacks.
    """
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device is cuda but no CUDA device is visible; use --device cpu")
    if config.precision == "fp16" and device.type != "cuda":
        raise UsageError("--precision fp16 needs a GPU; on a CPU use bf16 or float32")
    has_values = any(not p.is_meta for p in workload.model.parameters())
    model = workload.model.to(
        device if has_values else torch.device("meta"), DTYPES.get(config.precision, torch.float32)
    )
    settings = resolve_optimizer(config, workload, total_steps)
    optimizer = make_optimizer(model.parameters(), settings)
    strategy = KEEP_ALL if plain else strategy_of(config.memory, config.compressor)
    if strategy.prepare is not None:
        strategy.prepare(model, optimizer)
    return Replica(
        workload,
        model,
        optimizer,
        make_schedule(optimizer, settings),
        torch.amp.GradScaler(device.type) if config.precision == "fp16" else None,
        device,
        config.precision,
        strategy,
        accumulates=config.accumulate > 1,
    )


def strategy_of(text: str, compressor: str) -> Strategy:
    """The memory strategy that a specification asks for beside a compressor.

    Raises:
        UnknownName, UsageError: see `Axis.resolve` and `combined`.

    Example:
        >>> strategy_of("none", "none") == KEEP_ALL
        True
    """
    links = MEMORY.resolve(text).usable().links
    strategies: list[tuple[str, Strategy]] = [(link.name, link.build()) for link in links]
    compression = compression_of(compressor, 0)
    feedback = "none" if compression is None else compression.compressor.claims.feedback
    if why_no_mirror(compressor, feedback) is not None:
        # A strategy that would keep a mirror if there were anything for it does without.
        strategies = [(name, strategy.with_weak_mirror(None)) for name, strategy in strategies]
    return combined(strategies)


def resolve_optimizer(config: RunConfig, workload: Workload, total_steps: int) -> OptimizerSettings:
    """The user's settings, and the workload's own where the user gave none."""

    def either(given: float | None, own: float) -> float:
        return own if given is None else given

    return OptimizerSettings(
        config.optimizer,
        either(config.learning_rate, workload.learning_rate),
        either(config.momentum, workload.momentum),
        either(config.weight_decay, workload.weight_decay),
        config.schedule,
        config.warmup_steps,
        total_steps,
    )


def sample_order(config: RunConfig, workload: Workload, num_workers: int) -> SampleOrder:
    """Which samples go where; accumulation multiplies the samples of a step."""
    batch_size = (config.batch_size or workload.batch_size) * config.accumulate
    return SampleOrder(len(workload.train), num_workers, batch_size, config.seed)


def num_steps(config: RunConfig, order: SampleOrder) -> int:
    """How many steps the run has; DEFAULT_STEPS if the user named neither steps nor epochs."""
    if config.epochs is not None:
        return config.epochs * order.steps_per_epoch
    return config.steps or DEFAULT_STEPS


# One step's computation, shared by the trainer and by the single-process reference.


def backward(
    replica: Replica,
    indices: npt.NDArray[np.int64],
    num_parts: int,
    hold_back: Callable[[], AbstractContextManager[None]] = nullcontext,
    see: Callable[[tuple[torch.Tensor, ...]], None] | None = None,
) -> float:
    """Forward and backward over a worker's samples of one step, in `num_parts` micro-batches.

    Args:
        replica: the worker's model.
        indices: its samples of this step.
        num_parts: micro-batches whose gradients are averaged before anything is exchanged.
        hold_back: context of every micro-batch but the last, in which gradients stay here.
        see: is shown each micro-batch.

    Returns:
        The mean loss.
    """
    size = len(indices) // num_parts
    total = 0.0
    for part in range(num_parts):
        chosen = indices[part * size : (part + 1) * size]
        samples = replica.workload.train.batch(chosen)
        if see is not None:
            see(samples)
        batch = replica.to_device(samples)
        with hold_back() if part < num_parts - 1 else nullcontext():
            begun_s = time.perf_counter()
            loss = replica.loss(batch) / num_parts
            total += float(loss.detach())
            scaled = replica.scaler.scale(loss) if replica.scaler is not None else loss
            recorder, middle_s = replica.recorder, time.perf_counter()
            if recorder is not None:
                recorder.add("compute", "forward", begun_s, middle_s)
                recorder.is_last_part = part == num_parts - 1
                recorder.computing_since_s = middle_s
            torch.autograd.backward(scaled)
            if recorder is not None:
                recorder.add("compute", "backward", middle_s, time.perf_counter())
    return total


def update(replica: Replica, clip_norm: float | None) -> None:
    """Clip, step the optimizer and the schedule, and forget the gradients."""
    if replica.scaler is not None:
        replica.scaler.unscale_(replica.optimizer)
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(replica.model.parameters(), clip_norm)
    if replica.scaler is not None:
        replica.scaler.step(replica.optimizer)
        replica.scaler.update()
    else:
        replica.optimizer.step()
    replica.schedule.step()
    replica.optimizer.zero_grad(set_to_none=True)


RandomState = tuple[torch.Tensor, torch.Tensor | None]
"""Of the generators of the host and of one GPU."""


def random_state(device: torch.device) -> RandomState:
    """From where random numbers go on, on the host and on the device; other GPUs are left alone.

    Example:
        >>> kept = random_state(torch.device("cpu"))
        >>> first = torch.rand(1)
        >>> set_random_state(torch.device("cpu"), kept)
        >>> torch.equal(torch.rand(1), first)
        True
    """
    there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), there


def set_random_state(device: torch.device, state: RandomState) -> None:
    """Go on from there again."""
    host, there = state
    torch.set_rng_state(host)
    if there is not None and device.type == "cuda":
        torch.cuda.set_rng_state(there, device)
