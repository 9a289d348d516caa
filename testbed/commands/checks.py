"""What a command is given, checked before any process is started."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from testbed.base.axes import BackendFacts
from testbed.base.config import RunConfig
from testbed.base.config import option as option_of
from testbed.base.errors import UsageError
from testbed.base.files import find_trace
from testbed.base.parts import Resolved
from testbed.cluster.facts import Facts
from testbed.cluster.spec import parse_cluster
from testbed.prediction.nominal import parse_nominal
from testbed.records.cell import Cell
from testbed.sweeping.executor import failed_cell
from testbed.training.slowdown import parse_slowdowns


def check_files(json: Path | None, hostfile: Path | None, timeline: Path | None = None) -> None:
    """Fail before any process is started if a file cannot be read or written.

    Raises:
        UsageError: names the option and the path.
    """
    for name, file in (("--json", json), ("--timeline", timeline)):
        if file is not None:
            check_output(name, file)
    if json is not None and timeline is not None and json.resolve() == timeline.resolve():
        raise UsageError(f"--json and --timeline are both {str(json)!r}; expected two files")
    if hostfile is not None and not hostfile.is_file():
        raise UsageError(f"--hostfile is {str(hostfile)!r}, but there is no such file")


def check_output(option: str, path: Path, *, makes_folder: bool = False) -> None:
    """Fail before any work if a file that is to hold its result cannot be written.

    What is there and no regular file (a device, a pipe) is written into, see `write_atomically`.

    Args:
        option: as it is written on the command line.
        path: that was given with it.
        makes_folder: the command makes the folder if it is not there.

    Raises:
        UsageError: names the option and the path.
    """
    given = f"{option} is {str(path)!r}"
    if os.path.isdir(path):
        raise UsageError(f"{given}, a folder; expected the name of a file")
    if os.path.exists(path) and not os.path.isfile(path):
        if not os.access(path, os.W_OK):
            raise UsageError(f"{given}, which must not be written to; name another")
        return
    folder = (Path(os.path.realpath(path)) if os.path.islink(path) else path).parent
    while makes_folder and not os.path.exists(folder):
        folder = folder.parent
    if not os.path.isdir(folder):
        raise UsageError(f"{given}, but there is no folder {str(folder)!r}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{given}, in a folder that must not be written to; name another")


def refuse_unused(
    command: Callable[..., Any], values: Mapping[str, Any], unused: Sequence[str], where: str
) -> None:
    """Refuse options that were given and would be passed over without a word.

    Args:
        command: whose defaults they have where they were not given.
        values: of its parameters.
        unused: names of those that it has no use for here.
        where: that is, in words.

    Raises:
        UsageError: names them.

    Example:
        >>> refuse_unused(lambda cycles=1: None, {"cycles": 1}, ["cycles"], "with --memory")
    """
    defaults = inspect.signature(command).parameters
    given = [option_of(name) for name in unused if values[name] != defaults[name].default]
    if given:
        raise UsageError(
            f"{' and '.join(given)} given {where}, which has no use for it; leave it out"
        )


def check_inputs(config: RunConfig, num_workers: int | None) -> None:
    """Fail before any process is started if what a plan is made from cannot be had.

    Args:
        config: of the run.
        num_workers: how many there will be; None = a launcher decides.

    Raises:
        UsageError: names the option and the file, or the rank that is not there.
    """
    nominal = config.link is not None and parse_nominal(config.link) is not None
    for option, path in (("--link", None if nominal else config.link), ("--plan", config.plan)):
        if path is not None and not Path(path).is_file():
            raise UsageError(f"{option} is {path!r}, but there is no such file")
    if config.trace is not None:
        find_trace(config.trace)
    if config.slow is not None:
        parse_slowdowns(config.slow, num_workers)


def check_device(device: str) -> None:
    """Fail before any process is started if there is no such device.

    Raises:
        UsageError: says what is there.
    """
    if device == "cpu":
        return
    import torch

    if not device.startswith("cuda"):
        raise UsageError(f"--device is {device!r}; expected cpu or cuda")
    if not torch.cuda.is_available():
        raise UsageError(f"--device is {device!r}, but no CUDA device is visible; use cpu")


# Where a command runs: the emulated cluster that was asked for, or the one it is in already.


def cluster_text(asked: str | None, here: Facts | None) -> str | None:
    """The cluster of this command in its usual spelling; None: none.

    Raises:
        UsageError: inside one cluster another is asked for.
    """
    text = None if asked is None else parse_cluster(asked).text()
    if here is None:
        return text
    if text not in (None, here.spec):
        raise UsageError(
            f"--cluster is {asked!r}, but this is inside the cluster {here.spec!r}; leave it out, "
            "or start from outside"
        )
    return here.spec


def check_places(cluster: str, backend: Resolved[BackendFacts], workers: int | None) -> int:
    """The number of workers: as asked, else as many as the cluster has places for.

    Raises:
        UsageError: the places do not suffice, or the backend would not use the network.
    """
    spec = parse_cluster(cluster)
    if backend.facts.in_process:
        raise UsageError(
            f"backend {backend.name!r} joins threads of one process, which no network separates; "
            "leave --cluster out, or choose another backend"
        )
    servers = backend.facts.num_servers
    wanted = spec.places - servers if workers is None else workers
    if wanted < 1 or wanted + servers > spec.places:
        raise UsageError(
            f"{max(wanted, 1)} workers and {servers} dedicated servers need "
            f"{max(wanted, 1) + servers} places, but the cluster has {spec.nodes} x "
            f"{spec.ranks_per_node}; give nodes={max(wanted, 1) + servers}, or fewer of them"
        )
    return wanted


def check_one_place(here: Facts | None, hostfile: Path | None) -> None:
    """Refuse hosts of the user's for a run that makes hosts of its own.

    Raises:
        UsageError: there are both, outside of any cluster.
    """
    if here is None and hostfile is not None:
        raise UsageError(
            f"--hostfile is {str(hostfile)!r} beside --cluster, which makes hosts of its own; give "
            "one of them"
        )


def in_cluster(cell: Cell, facts: Facts | None) -> Cell:
    """The cell with the cluster that it was measured in.

    Where the cluster was not the one that was asked for, the cell has failed, and nothing measured
    stays in it.
    """
    if facts is None:
        return cell
    if facts.failure and cell.status == "ok":
        cell = failed_cell(cell.config, facts.failure, cell)
    return msgspec.structs.replace(cell, dilation=facts.dilation, cluster=facts.record)
