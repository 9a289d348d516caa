"""What is measured of a rank's steps: times, traffic, memory and cores; events where asked for."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import torch

from testbed.base.recorder import Recorder
from testbed.noise.other_processes import OtherProcesses
from testbed.noise.steal_time import StealTime, read_cores, shares_of
from testbed.training.compressed.engine import CompressionEngine
from testbed.training.protocol import Observer, StepRecord, TrainingSession
from testbed.training.summary import Outcome

SHORTEST_S = 0.25  # between two readings of the cores' counters
"""Cores are read after steps of so many seconds and more: the system counts in hundredths."""


SCHEDSTAT = Path("/proc/thread-self/schedstat")


class LayerEvents:
    """Forward and backward of each layer, when each gradient is ready, and updates.

    A layer is a module that owns parameters or has no other modules. Its backward pass is what
    passes between two gradients, that of modules without parameters included; what hooks of the
    session do when a gradient has come (packing, submitting) is left out.

    Made before the session, whose hooks have to come after its own; `follow` after it.

    Args:
        recorder: takes the events.
        model: that is trained.
    """

    def __init__(self, recorder: Recorder, model: torch.nn.Module) -> None:
        self._recorder = recorder
        self._parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._names = {
            id(p): (n, f"{n.rpartition('.')[0] or n} backward") for n, p in self._parameters
        }
        self._update_s = 0.0
        for name, module in model.named_modules():
            owns = any(True for _ in module.parameters(recurse=False))
            if owns or not any(True for _ in module.children()):
                self._time(module, f"{name or 'model'} forward")
        for _, parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """The session has put its hooks on: those that come after them."""
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)

    def _time(self, module: torch.nn.Module, name: str) -> None:
        """A method of the module's own costs a quarter of what a pair of hooks does."""
        clock, add, forward = time.perf_counter, self._recorder.add, module.forward

        def timed(*inputs: Any, **named: Any) -> Any:
            began_s = clock()
            output = forward(*inputs, **named)
            add("compute", name, began_s, clock())
            return output

        module.forward = timed

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        now_s, recorder = time.perf_counter(), self._recorder
        name, layer = self._names[id(parameter)]
        recorder.add("compute", layer, recorder.computing_since_s, now_s)
        if recorder.is_last_part:
            recorder.add("ready", name, now_s, now_s)
        recorder.computing_since_s = now_s  # unless the session has something to do first

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._update_s = time.perf_counter()

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        now_s = self._recorder.computing_since_s = time.perf_counter()
        self._recorder.add("update", "optimizer", self._update_s, now_s)


def read_awaited_s() -> float | None:
    """Seconds that this thread could have run so far and no core was free; None: not told here."""
    try:
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


class Recording(Observer):
    """Turns the recorder on for the measured steps, and one more: what that waits for is theirs.

    Args:
        recorder: takes the events.
        done: steps that were taken before.
        warmup: first steps after them that are not measured.
        root: process below which the run's own are on this machine; None: this one.
    """

    def __init__(self, recorder: Recorder, done: int, warmup: int, root: int | None) -> None:
        self._recorder = recorder
        recorder.first_step = done + warmup
        self._others = OtherProcesses(os.getpid() if root is None else root)
        self._cores, self._read_s = self._others.read(), time.perf_counter()
        self._awaited_s = read_awaited_s()
        self._begin(done)

    def after_step(self, record: StepRecord) -> None:
        """See `Observer.after_step`."""
        step, recorder = record.done - 1, self._recorder
        recorder.add("step", f"step {step}", record.began_s, record.ended_s, step)
        if record.ended_s - self._read_s >= SHORTEST_S:
            before, self._cores = self._cores, self._others.read()
            self._read_s = record.ended_s
            if recorder.on:
                used = self._cores.since(before)
                stolen_s = max(0.0, used.stolen_s)  # Linux may take back what it counted
                recorder.cores_used[step] = (used.busy_s + stolen_s, used.own_s, used.whole_s)
        before_s, now_s = self._awaited_s, read_awaited_s()
        self._awaited_s = now_s
        if before_s is not None and now_s is not None and recorder.on and record.step_s > 0:
            recorder.awaited[step] = min(1.0, (now_s - before_s) / record.step_s)
        self._begin(record.done)

    def _begin(self, step: int) -> None:
        self._recorder.step = step
        self._recorder.on = step >= self._recorder.first_step


class Measurement(Observer):
    """Times of the measured steps, memory, traffic, busy and stolen cores.

    Args:
        session: moves bytes.
        device: where the model is.
        warmup: first steps that are not measured.
        root: see `Run`.
    """

    def __init__(
        self, session: TrainingSession, device: torch.device, warmup: int, root: int | None
    ) -> None:
        self._session = session
        self._device = device
        self._warmup = warmup
        self._records: list[StepRecord] = []
        self._stolen: list[float] = []
        self._moved = session.traffic()
        reset_peak(device)
        self._others = OtherProcesses(os.getpid() if root is None else root)
        self._outside: list[float] = []
        self._cores, self._steal_time = read_cores(), StealTime()

    def after_step(self, record: StepRecord) -> None:
        """See `Observer.after_step`."""
        self._records.append(record)
        self._stolen.append(self._steal_time.share())
        self._outside.append(self._others.share())
        if len(self._records) == self._warmup:
            self._cores = read_cores()
            self._others.begin()
        if record.report.excluded_s:
            reset_peak(self._device)

    def finish(self, outcome: Outcome) -> None:
        """See `Observer.finish`."""
        outcome.cores_busy, outcome.cores_stolen = shares_of(self._cores, read_cores())
        outcome.cores_outside = self._others.whole_share()
        moved = self._session.traffic() - self._moved
        outcome.sent_bytes, outcome.received_bytes = moved.sent_bytes, moved.received_bytes
        outcome.peak_memory_bytes = peak_bytes(self._device)
        outcome.steps = len(self._records)
        outcome.training_time_s = self._records[-1].time_s
        outcome.loss = [record.loss for record in self._records]
        seen = [record.report.staleness for record in self._records]
        outcome.staleness = [clocks for clocks in seen if clocks is not None]
        measured = self._records[self._warmup :]
        outcome.step_time_s = [record.step_s for record in measured]
        outcome.exposed_s = [record.report.exposed_s for record in measured]
        outcome.unsteady = [not record.is_steady for record in measured]
        outcome.stolen = self._stolen[self._warmup :]
        outcome.outside = self._outside[self._warmup :]


class CompressionCosts(Observer):
    """What a compressor cost in the measured steps."""

    def __init__(self, engine: CompressionEngine) -> None:
        self._engine = engine

    def finish(self, outcome: Outcome) -> None:
        """See `Observer.finish`."""
        outcome.compression = self._engine.result(len(outcome.step_time_s))


# Peak memory of the training itself: imports, profiles and set-up before it do not count.

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def reset_peak(device: torch.device) -> None:
    """Forget the highest memory use so far (on Linux and on a GPU; elsewhere it stays)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        _CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Highest memory use since `reset_peak`: of the device, or the resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
