"""One rank of a run, from joining the job to leaving it, in good order or not."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import NoReturn, TypeVar

import msgspec
import torch

from testbed.backends.protocol import Group
from testbed.cluster.facts import find_facts
from testbed.cluster.spec import dilation_of
from testbed.config import RunConfig
from testbed.control.inproc import InprocHub
from testbed.control.protocol import Control, Loss
from testbed.errors import RankLost, TestbedError, UsageError
from testbed.launch.choosing import group_for
from testbed.launch.garbage import spare_what_lives, without_what_lives
from testbed.launch.join import Role, announce_identity, join, open_backend
from testbed.launch.planning import measures_link, predicted_step_s, prepare
from testbed.launch.probing import PROBE
from testbed.launch.telling import telling_of
from testbed.launch.threads import check_threads, own_threads
from testbed.records.cell import Cell
from testbed.records.environment import describe_environment
from testbed.training.compressed.compression import without_own_momentum
from testbed.training.outcome import Outcome
from testbed.training.replica import DEFAULT_STEPS, resolve_optimizer
from testbed.training.summary import make_cell
from testbed.training.trainer import Run, train
from testbed.workload import Workload
from testbed.workloads import load_workload

T = TypeVar("T")

# Rank 0 evaluates and computes the reference while the others wait; a lost rank ends the wait.
OUTCOME_S = 3600.0


@dataclass(frozen=True)
class Settings:
    """What a rank needs beside the configuration."""

    interface: str | None = None
    launcher: str = "alone"


def run_rank(config: RunConfig, role: Role, settings: Settings) -> Cell | None:
    """Join, train, leave; the cell on rank 0, None elsewhere. Never returns after a failure."""
    share_cores(config.threads, role.identity.local_size)
    device = place_device(config.device, role.identity.local_rank)
    announce_identity(role.identity)
    group = join(
        role,
        interface=settings.interface,
        deadline_s=config.deadline,
        device=device,
    )

    def live() -> Cell | None:
        if role.is_server:
            _serve(config, role, group)
            return None
        with telling_of(group.control, role.identity.rank, sys.stderr):
            return _work(msgspec.structs.replace(config, device=device), role, group)

    return as_member(role.identity.rank, group, live)


def as_member(rank: int, group: Group, live: Callable[[], T]) -> T:
    """Do what a member does between joining and leaving. Never returns after a failure.

    Args:
        rank: the member's number, for messages.
        group: the job that it joined; its control plane is closed in the end.
        live: what the member does there; whatever it raises is told to the others.
    """
    who = f"rank {rank} (host {group.host}, pid {os.getpid()})"
    _speak_when_ended(who, group.control)
    end_soon_after_loss(who, group)
    try:
        with without_what_lives():
            result = live()
        group.control.close()
    except BaseException as error:  # the others must hear of it, whatever it is
        _fail(who, group.control, error)
    return result


def end_soon_after_loss(who: str, group: Group) -> None:
    """Once a member is lost, end this process within the deadline, whatever it is busy with.

    The error usually reaches the main thread at its next wait; this is for ranks that compute,
    load or stand in a library call that a lost rank will never answer.
    """

    def end(loss: Loss) -> None:
        error = RankLost(loss.who, loss.why, f"this rank was {group.control.state}, and is ended")
        sys.stderr.write(f"testbed: {who}: RankLost: {error}\n")
        sys.stderr.flush()
        os._exit(1)

    def arm(loss: Loss) -> None:
        timer = threading.Timer(0.4 * group.deadline_s, end, (loss,))
        timer.daemon = True
        timer.start()

    group.control.on_loss(arm)


def run_threads(config: RunConfig, role: Role) -> Cell | None:
    """All ranks as threads of this process, for backends that join threads."""
    hub = InprocHub(role.num_workers)
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
        )
        try:
            with telling_of(group.control, rank, sys.stderr):
                cells[rank] = _work(config, role, group, build)
        except BaseException as error:  # handed to the caller's thread below
            errors.append(error)
            group.control.report_failure(str(error))

    torch.set_num_threads(config.threads or 1)
    threads = [threading.Thread(target=body, args=(r,)) for r in range(role.num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return cells[0]


def share_cores(threads: int | None, local_size: int) -> None:
    """Give each rank of this host its share of the cores, unless told otherwise.

    Raises:
        UsageError: it was told more threads than there are cores.
    """
    check_threads(threads)
    given = os.environ.get("OMP_NUM_THREADS", "")
    default = int(given) if given.isdigit() else own_threads(local_size, find_facts())
    torch.set_num_threads(threads or default)
    # The communication thread needs the interpreter between two of the main thread's calls.
    sys.setswitchinterval(0.0005)


def place_device(device: str, local_rank: int) -> str:
    """`cuda` becomes the device of this local rank; ranks share devices when there are too few."""
    if device != "cuda":
        return device
    count = torch.cuda.device_count()
    placed = f"cuda:{local_rank % max(1, count)}"
    if count:
        torch.cuda.set_device(placed)
    return placed


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
    build: Callable[[], Workload] | None = None,
) -> Cell | None:
    config = without_own_momentum(config)
    group.control.set_state("building the workload")
    make = build or (lambda: _build(config))
    workload = make()
    planned = prepare(config, role, group, workload, make)
    predicted_s = unrehearsed_s = None
    if group.rank == 0:
        predicted_s = predicted_step_s(planned, config.compressor)
        before = replace(planned, link=planned.fitted)
        unrehearsed_s = predicted_step_s(before, config.compressor)
    backend = open_backend(planned.role or role, group_for(planned.plan, group))
    run = Run(
        config,
        backend,
        group.control,
        make,
        planned.plan,
        planned.replan,
        dilation_of(config.cluster),
    )
    spare_what_lives()
    outcome = train(run, workload)
    group.control.set_state("waiting for the other ranks to finish")
    packed = msgspec.json.encode(outcome)
    everybody = group.control.all_gather("outcome", packed, OUTCOME_S, members=group.size)
    backend.close(group.deadline_s)
    if group.rank != 0:
        return None
    outcomes = [msgspec.json.decode(o, type=Outcome) for o in everybody]
    return make_cell(
        _resolved(config, workload),
        outcomes,
        plan=planned.plan,
        predicted_s=predicted_s,
        unrehearsed_s=unrehearsed_s,
        link=planned.link,
        data=workload.data,
        consistency=role.kind.consistency(role.options),
        num_servers=role.num_servers,
        num_machines=len(set(group.hosts)) or 1,
        environment=describe_environment(
            launcher=role.identity.launcher,
            launcher_variables=dict(role.identity.variables),
            hosts=list(group.hosts),
            torch_threads=torch.get_num_threads(),
            seed=config.seed,
            device=_device_name(config.device),
        ),
    )


def _serve(config: RunConfig, role: Role, group: Group) -> None:
    """A dedicated server: once for the measurement of the link, if there is one, then for good."""
    assert role.kind.serve is not None
    if measures_link(config):
        role.kind.serve(replace(group, name=PROBE), role.options)
    role.kind.serve(group, role.options)


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


def _speak_when_ended(who: str, control: Control) -> None:
    """A launcher that ends survivors does so by SIGTERM: say what was going on, then go."""

    def speak(signum: int, frame: FrameType | None) -> NoReturn:
        name = signal.Signals(signum).name
        loss = f"; {control.loss.who} is lost: {control.loss.why}" if control.loss else ""
        sys.stderr.write(f"testbed: {who}: ended by {name} while {control.state}{loss}\n")
        sys.stderr.flush()
        os._exit(128 + signum)

    signal.signal(signal.SIGTERM, speak)


def _fail(who: str, control: Control, error: BaseException) -> NoReturn:
    """Tell the others and end at once: a library that waits for a dead rank cannot be finalised."""
    if isinstance(error, TestbedError):
        words = f"{type(error).__name__}: {error}"
    elif isinstance(error, KeyboardInterrupt):
        words = "interrupted"
    else:
        words = f"{type(error).__name__}: {error}"
        traceback.print_exception(error)
    control.report_failure(f"it failed while {control.state} with {words}")
    sys.stderr.write(f"testbed: {who}: {words}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status_of(error))


def _status_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, UsageError) else 1
