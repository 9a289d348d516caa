"""Where a command runs: the emulated cluster that was asked for, or the one it is in already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from testbed.backends.protocol import BackendKind
from testbed.cluster.facts import Facts
from testbed.cluster.spec import parse_cluster
from testbed.errors import UsageError
from testbed.records.cell import Cell


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


def check_places(cluster: str, kind: BackendKind, options: Any, workers: int | None) -> int:
    """The number of workers: as asked, else as many as the cluster has places for.

    Raises:
        UsageError: the places do not suffice, or the backend would not use the network.
    """
    spec = parse_cluster(cluster)
    if kind.in_process:
        raise UsageError(
            f"backend {kind.name!r} joins threads of one process, which no network separates; "
            "leave --cluster out, or choose another backend"
        )
    servers = kind.num_servers(options)
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
        cell = Cell(
            status="failed",
            backend=cell.backend,
            workload=cell.workload,
            num_workers=cell.num_workers,
            config=cell.config,
            environment=cell.environment,
            command=cell.command,
            error=facts.failure,
        )
    return msgspec.structs.replace(cell, dilation=facts.dilation, cluster=facts.record)
