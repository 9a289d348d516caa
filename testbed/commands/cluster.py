"""`testbed cluster`: any command inside an emulated cluster."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from testbed.base.errors import UsageError
from testbed.cluster.facts import find_facts
from testbed.cluster.spec import parse_cluster
from testbed.launch.allocation import run_in_cluster


def cluster(
    command: Annotated[list[str], typer.Argument(help="-- COMMAND...", metavar="COMMAND...")],
    nodes: Annotated[
        int | None, typer.Option(help="hosts: node1, node2, ...", show_default="4")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="of each link, each direction", show_default="10gbit")
    ] = None,
    dilation: Annotated[
        float | None,
        typer.Option(
            help="how many times slower links and replayed compute are here", show_default="1"
        ),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(
            help="of each packet, one way, as 50us; without netem for dilations from 40 on",
            show_default="none",
        ),
    ] = None,
    jitter: Annotated[
        str | None, typer.Option(help="latency varies by up to so much", show_default="none")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="share of lost packets; needs netem", show_default="none")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="worker processes of a node", show_default="1")
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(help="all of it, and more, as the other commands' --cluster takes it"),
    ] = None,
) -> None:
    """Run a command on node 1 of an emulated cluster: real processes, sockets and MPI.

    Each node has a host name, an address and a shaped link of its own. Rates and times are those of
    the cluster that is emulated; the kernel gets rate / dilation. mpirun (the packages' own where
    none is on PATH) finds the nodes by itself (PRTE_MCA_prte_default_hostfile,
    PRTE_MCA_plm_ssh_agent, PRTE_MCA_prte_if_include, OMPI_MCA_btl, OMPI_MCA_btl_tcp_if_include,
    _sndbuf and _eager_limit, OMPI_MCA_pml and OMPI_MCA_mpi_yield_when_idle are set), Gloo its
    interface (GLOO_SOCKET_IFNAME), `testbed run` and `testbed comm` know where they are
    (TESTBED_CLUSTER), and `$TESTBED_ENTER node2 COMMAND...` runs a command on another node.

    More, for --spec: `up.3=1gbit`, `down.3=1gbit`, `rate.3=1gbit` for node 3's link,
    `change=10s:2:1gbit+20s:all:10gbit+30s:2:down` for links that change so long after the start,
    `latency_by=netem`, `relay` or `injected`, `cpu_policy=batch` (SCHED_BATCH: the nodes share
    this machine's cores, and who computes keeps one until it waits or its slice is over) or `other`
    (the policy under which the testbed was started), `cores=pinned` (each node keeps to its share
    of the cores, an equal number; those left over stay idle), `shared`, or `auto`, pinned where
    they can be dealt out; `awake=no` (idle cores halt; `auto`: as root they poll while the cluster
    is up, on the whole machine, so that no message waits for a core to wake).

    Dilation makes links, latencies and replayed compute slower, not what this machine's processes
    do themselves: a message's start and encoding look 1 / dilation as long as they are. Latency and
    jitter are each packet's: the kernel's netem makes them, or, where it has none, a relay: a
    process of the testbed that holds packets and shapes links, as root and at dilations of 40 and
    more, so that it leaves the cores to those who compute. `latency_by=injected` is no network's
    latency: every exchange waits once, however many messages it is made of. Changes count from the
    command's start, which loads, plans and warms up before it measures.

    Needs root, or a kernel that lets users make namespaces.

    Examples:
        testbed cluster --nodes 4 --rate 10gbit --dilation 10 -- testbed comm --backend mpi-ring

        testbed cluster --nodes 2 --rate 1gbit -- mpirun -n 2 testbed run --backend gloo

        testbed cluster --spec nodes=2,rate.2=100mbit -- ping -c 1 node2
    """
    given = {
        "nodes": nodes,
        "rate": rate,
        "dilation": dilation,
        "latency": latency,
        "jitter": jitter,
        "loss": loss,
        "ranks_per_node": ranks_per_node,
    }
    pieces = [spec] if spec else []
    pieces += [f"{name}={value}" for name, value in given.items() if value is not None]
    text = parse_cluster(",".join(pieces)).text()
    if find_facts(os.environ) is not None:
        raise UsageError("this is inside an emulated cluster already; start another from outside")
    raise typer.Exit(run_in_cluster(text, command))
