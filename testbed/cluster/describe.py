"""What is recorded of a cluster: asked for, set in the kernel, and how latency is made."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed.cluster.facts import Facts
from testbed.cluster.topology import MTU, QUEUE_BYTES, Topology


def facts_of(topology: Topology, hostfile: Path, tcp: Mapping[str, list[str]], awake: str) -> Facts:
    """The facts of a cluster that has just come up.

    Args:
        topology: what was built.
        hostfile: Open MPI's.
        tcp: setting -> the values that the nodes have.
        awake: as `kept_awake` gives it.
    """
    spec = topology.spec
    injects = topology.mechanism == "injected"
    links = [
        {
            "node": node.number,
            **{f"{d}_bps": spec.link_bps(node.number, d) for d in ("up", "down")},
            **{f"kernel_{d}_bps": spec.kernel_bps(node.number, d) for d in ("up", "down")},
        }
        for node in topology.nodes
    ]
    record: dict[str, Any] = {
        "spec": spec.text(),
        "nodes": spec.nodes,
        "ranks_per_node": spec.ranks_per_node,
        "dilation": spec.dilation,
        "cpu_policy": spec.cpu_policy,
        "cores": "shared" if topology.node_cores is None else "pinned",
        "node_cores": topology.node_cores,
        "cores_awake": awake,
        "links": links,
        "slowest_kernel_bps": spec.slowest_kernel_bps,
        "latency": topology.mechanism or "none",
        "latency_s": spec.latency_s,
        "jitter_s": spec.jitter_s,
        "kernel_latency_s": spec.latency_s * spec.dilation,
        "loss": spec.loss_share,
        "changes": [],
        "mtu_bytes": MTU,
        "queue_bytes": QUEUE_BYTES,
        "tcp": dict(tcp),
        "kernel": platform.release(),
    }
    return Facts(
        spec=spec.text(),
        dilation=spec.dilation,
        places=spec.places,
        hostfile=str(hostfile),
        latency_s=spec.latency_s * spec.dilation if injects else 0.0,
        jitter_s=spec.jitter_s * spec.dilation if injects else 0.0,
        record=record,
    )
