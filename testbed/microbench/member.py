"""The life of one process of `testbed comm`: join, open every backend or serve, measure, leave."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue

import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.errors import UsageError
from testbed.launch.join import Role, announce_identity, join, open_backend
from testbed.launch.lifecycle import as_member, place_device, share_cores
from testbed.microbench.contestants import Contestant, check_opened, own_group
from testbed.microbench.measure import SizeSamples, measure
from testbed.records.comm import CommConfig

Hear = Callable[[SizeSamples], None]


def run_member(
    config: CommConfig,
    contestants: Sequence[Contestant],
    role: Role,
    interface: str | None,
    begin: Callable[[Group], Hear],
) -> bool:
    """Take part in the job to its end; whether this process is rank 0. Never returns if it fails.

    Args:
        config: what to measure.
        contestants: the backends, in the order of `config.backend`.
        role: worker or server.
        interface: network interface or address to use; None = decided.
        begin: called on rank 0 when all backends are open; what it returns is given the samples of
            each size as they come.

    Raises:
        UsageError: the device is not there.
        RankLost, DeadlineExceeded, Disagreement: the job did not come together.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device is cuda but no CUDA device is visible; use --device cpu")
    share_cores(config.threads, role.identity.local_size)
    device = place_device(config.device, role.identity.local_rank)
    announce_identity(role.identity)
    group = join(role, interface=interface, deadline_s=config.deadline, device=device)

    def live() -> None:
        if role.backend.facts.needs_mpi:
            # MPI starts on all processes of the launcher or on none; a server that did not start
            # it would keep the workers waiting.
            importlib.import_module("mpi4py.MPI")
        if role.is_server:
            serve_all(contestants, group)
        else:
            _work(config, contestants, role, group, begin)

    as_member(role.identity.rank, group, live)
    return role.identity.rank == 0


def _work(
    config: CommConfig,
    contestants: Sequence[Contestant],
    role: Role,
    group: Group,
    begin: Callable[[Group], Hear],
) -> None:
    backends: list[Backend] = []
    for number, contestant in enumerate(contestants):
        group.control.state = f"opening {contestant.text}"
        own_role = replace(role, backend=contestant)
        backends.append(open_backend(own_role, own_group(group, contestants, number)))
        check_opened(config, backends[-1], contestant.text, group.device)
    hear = begin(group) if group.rank == 0 else None
    for samples in measure(config, backends, group.control, group.device):
        if hear is not None:
            hear(samples)
    group.control.state = "leaving"
    for backend in backends:
        backend.close(group.deadline_s)


def serve_all(contestants: Sequence[Contestant], group: Group) -> None:
    """What a dedicated server process does: each backend that wants it has a thread of its own.

    A backend that asks for fewer servers than there are is served by the first of them alone.

    Raises:
        RankLost: a member was lost; anything else that a server raised comes through too.
    """
    index = group.rank - group.size
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def serve(number: int) -> None:
        contestant = contestants[number]
        serve = contestant.facts.serve
        assert serve is not None
        try:
            serve(own_group(group, contestants, number), contestant.options)
        except BaseException as error:  # raised again on the main thread, which tells the others
            ended.put(error)
        else:
            ended.put(None)

    numbers = [n for n, c in enumerate(contestants) if index < c.facts.num_servers]
    for number in numbers:
        threading.Thread(target=serve, args=(number,), name=f"serve-{number}", daemon=True).start()
    for _ in numbers:
        error = ended.get()
        if error is not None:
            raise error
