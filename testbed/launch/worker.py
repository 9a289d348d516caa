"""One rank of a run, from joining the job to leaving it, in good order or not."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.config import RunConfig, reproduce
from testbed.base.errors import UsageError
from testbed.base.files import write_atomically
from testbed.base.recorder import Recorder, Shown, as_read
from testbed.cluster.spec import dilation_of
from testbed.control.inproc import InprocHub
from testbed.control.protocol import UNTIL_LOST_S, decided_by_first, hand_to_first
from testbed.forking import how_started
from testbed.forking.process import root_of
from testbed.launch.join import Role, announce_identity, join, left_to_start_s, open_backend
from testbed.launch.lifecycle import (
    as_member,
    freeze_long_lived,
    place_device,
    settle_allocator,
    share_cores,
)
from testbed.launch.link_probe import PROBE
from testbed.launch.memory_forecast import batch_that_fits
from testbed.launch.plan_options import group_for
from testbed.launch.planning import measures_link, predicted_step_s, prepare, pricing_of
from testbed.launch.progress import progress_of
from testbed.launch.timeline import clock_of, describe_timeline, hand_in, make_timeline
from testbed.memory.recording.calibrate import give_back_pages
from testbed.records.cell import Cell
from testbed.records.environment import describe_environment
from testbed.records.progress import RunProgress
from testbed.records.timeline import Timeline, encode_timeline
from testbed.training.compressed.spec import without_own_momentum
from testbed.training.protocol import Observer, Run, StepRecord
from testbed.training.replica import DEFAULT_STEPS, resolve_optimizer
from testbed.training.summary import Outcome, make_cell
from testbed.training.trainer import train
from testbed.workloads.load import load_workload
from testbed.workloads.workload import Workload


class StepsDone(Observer):
    """Keeps the last step, for a thread that tells how far the run is."""

    def __init__(self) -> None:
        self._last: StepRecord | None = None
        self._first = self._total = 0
        self._told: StepRecord | None = None
        self._began: tuple[int, float] | None = None
        self._step_s = 0.0

    def begin(self, first: int, total: int) -> None:
        """See `Observer.begin`."""
        self._first, self._total = first, total

    def after_step(self, record: StepRecord) -> None:
        """See `Observer.after_step`."""
        self._last = record

    def now(self, state: str) -> RunProgress:
        """How far the run is; the time of a step is the mean over those since the last call."""
        last, told = self._last, self._told
        if last is None:
            return RunProgress(state, 0, self._total)
        before = (self._first, 0.0) if told is None else (told.done, told.time_s)
        if last.done > before[0]:
            self._step_s = (last.time_s - before[1]) / (last.done - before[0])
            self._told = last
        at_s = time.perf_counter()
        self._began = self._began or (last.done, at_s)
        steps, passed_s = last.done - self._began[0], at_s - self._began[1]
        each_s = passed_s / steps if steps else self._step_s  # with all that lies between steps
        left_s = (self._total - last.done) * each_s
        return RunProgress(state, last.done, self._total, self._step_s, left_s)


@dataclass(frozen=True)
class Settings:
    """What a rank needs beside the configuration.

    Attributes:
        interface: to use; None = decided.
        launcher: that started the rank.
        timeline: where rank 0 writes what all ranks did; None = nothing is recorded.
        quiet: nobody is told how far the run is.
        clock: what this rank's clock shows; a test gives one that is ahead and drifts.
    """

    interface: str | None = None
    launcher: str = "alone"
    timeline: Path | None = None
    quiet: bool = False
    clock: Shown = as_read


def run_rank(config: RunConfig, role: Role, settings: Settings) -> Cell | None:
    """Join, train, leave; the cell on rank 0, None elsewhere. Never returns after a failure."""
    share_cores(config.threads, role.identity.local_size)
    settle_allocator(returns_pages=config.budget_mb is not None)
    device = place_device(config.device, role.identity.local_rank)
    announce_identity(role.identity)
    group = join(
        role,
        interface=settings.interface,
        deadline_s=config.deadline,
        start_s=left_to_start_s(config.start_deadline),
        device=device,
    )

    def live() -> Cell | None:
        if role.is_server:
            _serve(config, role, group, settings)
            return None
        steps, alone = StepsDone(), settings.launcher == "alone"
        with progress_of(
            *(group.control, group.rank, sys.stderr, steps.now), alone=alone, quiet=settings.quiet
        ):
            placed = msgspec.structs.replace(config, device=device)
            return _as_asked(_work(placed, role, group, settings, steps), config)

    return as_member(role.identity.rank, group, live)


def _as_asked(cell: Cell | None, config: RunConfig) -> Cell | None:
    """The cell with the device that was asked for: `cuda` is another one on each rank."""
    if cell is not None:
        cell.config = msgspec.structs.replace(cell.config, device=config.device)
        cell.command = reproduce(cell.config)
    return cell


def run_threads(config: RunConfig, role: Role, settings: Settings) -> Cell | None:
    """All ranks as threads of this process, for backends that join threads."""
    hub = InprocHub(role.num_workers)
    placed = msgspec.structs.replace(config, device=place_device(config.device, 0))
    building = threading.Lock()
    cells: dict[int, Cell | None] = {}
    errors: list[BaseException] = []

    def build() -> Workload:
        with building:  # torch's random generator belongs to the whole process
            return _build(config)

    def body(rank: int) -> None:
        group = Group(
            rank,
            role.num_workers,
            hub.member(rank),
            deadline_s=0.8 * config.deadline,
            hosts=("localhost",) * role.num_workers,
            device=placed.device,
        )
        try:
            steps, quiet = StepsDone(), settings.quiet
            with progress_of(group.control, rank, sys.stderr, steps.now, alone=True, quiet=quiet):
                cell = _work(placed, role, group, settings, steps, build)
                cells[rank] = _as_asked(cell, config)
        except BaseException as error:  # handed to the caller's thread below
            error.add_note(f"on rank {rank}")
            errors.append(error)
            group.control.report_failure(f"{type(error).__name__}: {error}")

    torch.set_num_threads(config.threads or 1)
    settle_allocator(returns_pages=config.budget_mb is not None)
    threads = [threading.Thread(target=body, args=(r,)) for r in range(role.num_workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        sys.stderr.write("testbed: interrupted by SIGINT; ending all ranks\n")
        sys.stderr.flush()
        os._exit(130)  # threads cannot be ended one by one
    if errors:
        raise errors[0]
    return cells[0]


def _build(config: RunConfig) -> Workload:
    workload = load_workload(
        config.workload,
        seed=config.seed,
        data_dir=config.data,
        dilation=dilation_of(config.cluster),
    )
    if workload.recorded is not None and config.batch_size not in (None, workload.batch_size):
        raise UsageError(
            f"--batch-size is {config.batch_size}, but {config.workload} was recorded with "
            f"{workload.batch_size} samples; leave it out"
        )
    return workload


def _work(
    config: RunConfig,
    role: Role,
    group: Group,
    settings: Settings,
    steps: StepsDone,
    build: Callable[[], Workload] | None = None,
) -> Cell | None:
    began = datetime.now(UTC).isoformat(timespec="milliseconds")
    config = without_own_momentum(config)
    group.control.state = "building the workload"
    make = build or (lambda: _build(config))
    workload = make()
    if config.max_batch:
        config = _with_largest_batch(config, workload, group)
    planned = prepare(config, role, group, workload, make)
    predicted_s = unrehearsed_s = None
    if group.rank == 0:
        predicted_s = predicted_step_s(planned, config.compressor)
        before = replace(planned, link=planned.fitted)
        unrehearsed_s = predicted_step_s(before, config.compressor)
    recorder = None if settings.timeline is None else Recorder()
    group = replace(group, recorder=recorder)
    backend = open_backend(planned.role or role, group_for(planned.plan, group))
    alone = build is not None or group.size + role.num_servers == 1
    run = Run(
        config,
        backend,
        group.control,
        make,
        plan=planned.plan,
        replan=planned.replan,
        dilation=dilation_of(config.cluster),
        pricing=pricing_of(planned, config),
        root=root_of(os.environ, alone=alone),
        observers=(steps,) if group.rank == 0 else (),
        recorder=recorder,
    )
    freeze_long_lived()
    with clock_of(group):
        outcome = train(run, workload)
    settled, data = _resolved(config, workload), workload.data
    del workload, run  # rank 0 may still train alone, beside ranks that only wait for it
    gc.unfreeze()
    gc.collect()
    give_back_pages()
    outcome.started = how_started()
    group.control.state = "waiting for the other ranks to finish"
    packed = msgspec.json.encode(outcome)
    # Rank 0 evaluates and trains the reference alone before it comes here.
    everybody = hand_to_first(group.control, "outcome", packed, UNTIL_LOST_S, group.size)
    backend.close(group.deadline_s)
    recorded = None if recorder is None else hand_in(group, settings.clock)
    if group.rank != 0:
        return None
    outcomes = [msgspec.json.decode(o, type=Outcome) for o in everybody]
    cell = make_cell(
        settled,
        outcomes,
        plan=planned.plan,
        predicted_s=predicted_s,
        unrehearsed_s=unrehearsed_s,
        prediction="" if predicted_s is None else planned.kind,
        link=planned.link,
        data=data,
        consistency=role.backend.facts.consistency,
        num_servers=role.num_servers,
        num_machines=len({*group.hosts, *group.server_hosts}) or 1,
        opened_as=_opened_as(role, backend),
        environment=describe_environment(
            began=began,
            launcher=role.identity.launcher,
            started=" and ".join(sorted({o.started for o in outcomes})),
            launcher_variables=dict(role.identity.variables),
            hosts=list(group.hosts),
            torch_threads=torch.get_num_threads(),
            seed=config.seed,
            device=_device_name(config.device),
            sets=role.backend.facts.sets,
        ),
    )
    if recorder is not None and settings.timeline is not None:
        timeline = make_timeline(
            cell, recorded or (), outcomes, recorder, planned.link, dilation_of(config.cluster)
        )
        _write_timeline(timeline, settings.timeline)
    return cell


def _opened_as(role: Role, backend: Backend) -> str:
    """See `Cell.opened_as`."""
    settled = backend.capabilities.settled
    if settled is None or settled == role.backend.options:
        return ""
    return role.backend.with_options(settled).text


def _with_largest_batch(config: RunConfig, workload: Workload, group: Group) -> RunConfig:
    """See `batch_that_fits`, which rank 0 asks."""
    group.control.state = "looking for the largest batch that fits"

    def find() -> bytes:
        return str(batch_that_fits(config, workload)).encode()

    size = decided_by_first(group.control, "batch", find, UNTIL_LOST_S, group.size)
    return msgspec.structs.replace(config, batch_size=int(size))


def _write_timeline(timeline: Timeline, path: Path) -> None:
    told = describe_timeline(timeline)
    try:
        write_atomically(path, encode_timeline(timeline))
    except OSError as error:  # the record of the training is worth more than its timeline
        told = f"not written ({error.strerror}); give another file to --timeline"
    sys.stderr.write(f"testbed: {path}: {told}\n")


def _serve(config: RunConfig, role: Role, group: Group, settings: Settings) -> None:
    """A dedicated server: once for the measurement of the link, if there is one, then for good."""
    serve = role.backend.facts.serve
    assert serve is not None
    if measures_link(config):
        serve(replace(group, name=PROBE), role.backend.options)
    if settings.timeline is None:
        serve(group, role.backend.options)
        return
    group = replace(group, recorder=Recorder(on=True))
    with clock_of(group):
        serve(group, role.backend.options)
    hand_in(group, settings.clock)


def _resolved(config: RunConfig, workload: Workload) -> RunConfig:
    """The configuration with the workload's own values where the user gave none."""
    settings = resolve_optimizer(config, workload, 1)
    return msgspec.structs.replace(
        config,
        batch_size=config.batch_size or workload.batch_size,
        learning_rate=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        steps=config.steps if config.epochs is not None else config.steps or DEFAULT_STEPS,
    )


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
