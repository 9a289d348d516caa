"""`testbed comm --fit`: the cost of a message on each backend, fitted to measured times."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from testbed.backends.protocol import Backend, Group
from testbed.base.config import option
from testbed.base.errors import UsageError
from testbed.base.files import save_link
from testbed.base.link import Link
from testbed.cluster.facts import Facts, find_facts
from testbed.launch.join import Role, announce_identity, join, open_backend
from testbed.launch.progress import progress_of
from testbed.microbench.contestants import Contestant, check_opened, own_group
from testbed.prediction.emulated import stretched_link
from testbed.profiling.table import link_table
from testbed.records.comm import CommConfig

MAX_CHANNELS = 4


def fit_arguments(output: Path | None) -> list[str]:
    """What the ranks that `testbed comm --fit` starts are told beside its configuration."""
    return ["--fit", *(["-o", str(output.absolute())] if output else [])]


def link_path(output: Path, label: str, num_backends: int) -> Path:
    """Where a backend's link goes: `-o` itself for one backend, beside it for several.

    Example:
        >>> str(link_path(Path("link.json"), "mpi:blocking=1", 2))
        'link-mpi-blocking-1.json'
    """
    if num_backends == 1:
        return output
    return output.with_name(f"{output.stem}-{re.sub(r'[^A-Za-z0-9.]+', '-', label)}{output.suffix}")


def check_fit(config: CommConfig, output: Path | None, fit: bool) -> None:
    """Refuse what cannot be fitted, before any process is started.

    Raises:
        UsageError: `-o` without `--fit`, or another operation or dtype than a link speaks of, or
            how often and at which sizes to exchange.
    """
    if not fit:
        if output is not None:
            raise UsageError("-o is given without --fit; add --fit, or write results with --json")
        return
    if config.op != "sum" or config.dtype != "float32":
        raise UsageError(
            f"--fit measures sums of float32, and --op is {config.op}, --dtype {config.dtype}; "
            "leave both out"
        )
    if config.max_bytes < 2048:
        raise UsageError(
            f"--max is {config.max_bytes} bytes; expected 2K or more: --fit sends 1K and up, twice "
            "as much each time"
        )
    usual = CommConfig(backend=config.backend)
    names = ["factor", "iters", "warmup", "check"]
    if config.max_bytes >= usual.min_bytes:  # else the range of exchanges needs a smaller one
        names.insert(0, "min_bytes")
    given = [name for name in names if getattr(config, name) != getattr(usual, name)]
    if given:
        words = ", ".join(option(name.removesuffix("_bytes")) for name in given)
        raise UsageError(f"--fit chooses sizes and repeats by itself; leave out {words}")


def fit_member(
    config: CommConfig,
    contestants: Sequence[Contestant],
    role: Role,
    interface: str | None,
    output: Path | None,
) -> int:
    """One process of the job, from joining to leaving; never returns if it fails.

    Returns:
        Exit status.
    """
    import torch

    from testbed.launch.lifecycle import as_member, place_device, share_cores
    from testbed.microbench.member import serve_all

    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device is cuda but no CUDA device is visible; use --device cpu")
    share_cores(config.threads, role.identity.local_size)
    device = place_device(config.device, role.identity.local_rank)
    announce_identity(role.identity)
    group = join(role, interface=interface, deadline_s=config.deadline, device=device)

    def live() -> None:
        if role.backend.facts.needs_mpi:
            # MPI starts on all processes of the launcher or on none.
            importlib.import_module("mpi4py.MPI")
        if role.is_server:
            serve_all(contestants, _with_channels(group, MAX_CHANNELS))
            return
        with progress_of(group.control, role.identity.rank, sys.stderr):
            _work(config, contestants, role, group, output)

    as_member(role.identity.rank, group, live)
    return 0


def _work(
    config: CommConfig,
    contestants: Sequence[Contestant],
    role: Role,
    group: Group,
    output: Path | None,
) -> None:
    from testbed.profiling.link import measure_link
    from testbed.profiling.sweep import thorough

    # All are opened before any is measured: dedicated servers wait for their workers already.
    opened: list[tuple[Contestant, Backend, str]] = []
    for number, contestant in enumerate(contestants):
        group.control.state = f"opening {contestant.text}"
        backend, note = _open(contestants, number, role, group)
        check_opened(config, backend, contestant.text, group.device)
        opened.append((contestant, backend, note))
    for contestant, backend, note in opened:
        link = measure_link(
            backend,
            group.control,
            name=contestant.text,
            num_workers=group.size,
            deadline_s=config.deadline,
            sweep=thorough(config.max_bytes),
            device=group.device,
        )
        if group.rank == 0:
            link = as_in_cluster(link, find_facts(os.environ))
            path = link_path(output, contestant.text, len(contestants)) if output else None
            _show(link, note, path)
    group.control.state = "leaving"
    for _, backend, _ in opened:
        backend.close(group.deadline_s)


def _open(
    contestants: Sequence[Contestant], number: int, role: Role, group: Group
) -> tuple[Backend, str]:
    """The backend with several channels, or with one and a note why; collective."""
    contestant = contestants[number]
    own_role = replace(role, backend=contestant)
    mine = own_group(group, contestants, number)
    try:
        several = _with_channels(mine, MAX_CHANNELS)
        return open_backend(own_role, several), ""
    except UsageError as error:  # its options allow one channel; every rank is refused alike
        return open_backend(own_role, mine), str(error)


def _with_channels(group: Group, num_channels: int) -> Group:
    return replace(group, num_channels=num_channels)


def as_in_cluster(link: Link, facts: Facts | None) -> Link:
    """The link of the emulated cluster: measured times over the dilation, which `extra` tells."""
    if facts is None:
        return link

    told = {"dilation": facts.dilation, "cluster": facts.record}
    faster = stretched_link(link, 1 / facts.dilation)
    return msgspec.structs.replace(faster, extra={**faster.extra, **told})


def _show(link: Link, note: str, path: Path | None) -> None:
    text = link_table(link)
    text += f"# concurrent messages not measured: {note}\n" if note else ""
    if path is not None:
        save_link(link, path)
        text += f"# written to {path}\n"
    sys.stdout.write(text)
    sys.stdout.flush()
