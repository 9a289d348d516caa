"""From a cluster's description to the commands that build it; pure.

Each node is a network namespace with one cable (a pair of veth devices) to a bridge, which stands
in a namespace of its own, so that clusters can have equal addresses without a connection. A
node's `up` direction is shaped where packets leave the node, `down` where they leave the bridge.
Where a relay makes latency, it is the switch, and shapes (`relay`).
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.cluster.facts import Facts
from testbed.cluster.spec import WAYS, ClusterSpec, Direction, Mechanism, Shaper
from testbed.cluster.switching import MAC

SUBNET = "10.211.77"
CIDR = f"{SUBNET}.0/24"
DEVICE = "tb0"
BRIDGE = "bridge0"
MTU = 1500

# htb lets a packet leave whenever its bucket is not overdrawn, whatever the packet's size, so that
# the bucket need not hold one: after a pause hardly more passes at once than the link carries. A
# packet leaves whole, so that TCP, which hands over up to 64 KiB at once, is held to less. Both
# sizes do up to 500 Mbit/s and grow above: there is a timer for each packet, and what the line
# could have carried while it was late is lost beyond a bucket (at 1 Gbit/s a fifth of the rate).
HTB_BURST_BYTES, HTB_BURST_S = 1600, 25.6e-6
PACKET_BYTES, PACKET_S = 8192, 131.072e-6
# tbf, where there is no htb, needs a bucket that lets the largest packet through whole, and as much
# again as the link carries while the kernel's timer is late on a busy machine.
LARGEST_PACKET_BYTES = 1 << 16
# Large packets make less work for the relay, which counts a link's time to the byte for any size.
RELAYED_PACKET_BYTES = 1 << 16
RELAYED_PACKETS = 10_000
TIMER_SLACK_S = 1e-3
# Long enough for what all senders may have under way to one node: a drop makes TCP wait for 200 ms.
QUEUE_BYTES = 32 << 20

Command = tuple[str, ...]
BATCH: Command = ("chrt", "--batch", "0")


@dataclass(frozen=True)
class Node:
    """One emulated host.

    Attributes:
        number: from 1.
        namespace: of its network.
    """

    number: int
    namespace: str

    @property
    def host(self) -> str:
        """Its host name."""
        return f"node{self.number}"

    @property
    def address(self) -> str:
        """Its address in the network of the cluster."""
        return f"{SUBNET}.{self.number}"

    @property
    def mac(self) -> str:
        """Its card's address, where the relay is the switch.

        Example:
            >>> Node(2, "n2").mac
            '02:00:00:00:00:02'
        """
        return bytes((*MAC, self.number)).hex(":")

    @property
    def port(self) -> str:
        """The bridge's end of its cable."""
        return f"port{self.number}"


@dataclass(frozen=True)
class Topology:
    """Namespaces and cables of one cluster.

    Attributes:
        prefix: of the names of its namespaces.
        spec: rates and number of nodes.
        mechanism: how latency is made; None = there is none.
        shaper: what keeps a link to its rate.
        cores: of this machine, to be distributed over the nodes; empty = not pinned.
    """

    prefix: str
    spec: ClusterSpec
    mechanism: Mechanism | None = None
    shaper: Shaper = "htb"
    cores: tuple[int, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The hosts."""
        return tuple(Node(n, f"{self.prefix}n{n}") for n in range(1, self.spec.nodes + 1))

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"{self.prefix}switch"

    @property
    def round_trip_s(self) -> float:
        """Real seconds that packets spend in the latency of both ways, at most; else 0."""
        if self.mechanism not in ("netem", "relay"):
            return 0.0
        return 2 * (self.spec.latency_s + self.spec.jitter_s) * self.spec.dilation

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All of them."""
        return (self.switch, *(node.namespace for node in self.nodes))

    def build(self) -> list[Command]:
        """Commands that make everything but the namespaces, in order."""
        if self.mechanism == "relay":
            return [command for node in self.nodes for command in self._card(node)]
        commands: list[Command] = [
            ("ip", "-n", self.switch, "link", "add", BRIDGE, "type", "bridge"),
            ("ip", "-n", self.switch, "link", "set", BRIDGE, "up"),
        ]
        for node in self.nodes:
            commands += self._cable(node)
            for direction in WAYS:
                commands += self.shape(node, direction)
        return commands

    def _cable(self, node: Node) -> list[Command]:
        inside, switch = ("ip", "-n", node.namespace), ("ip", "-n", self.switch)
        pair = ("type", "veth", "peer", "name", DEVICE, "netns", node.namespace)
        fastest_bps = max(self.spec.kernel_bps(node.number, way) for way in WAYS)
        size: Command = ()
        if self.shaper == "htb":
            size = ("gso_max_size", str(packet_bytes(fastest_bps)))
        return [
            (*switch, "link", "add", node.port, "mtu", str(MTU), *pair),
            (*switch, "link", "set", node.port, *size, "master", BRIDGE, "up"),
            (*inside, "address", "add", f"{node.address}/24", "dev", DEVICE),
            (*inside, "link", "set", DEVICE, "mtu", str(MTU), *size, "up"),
            (*inside, "link", "set", "lo", "up"),
        ]

    def _card(self, node: Node) -> list[Command]:
        """What a card that the relay made still lacks."""
        inside = ("ip", "-n", node.namespace)
        words: Command = ("address", node.mac, "mtu", str(MTU), "txqueuelen", str(RELAYED_PACKETS))
        words += ("gso_max_size", str(RELAYED_PACKET_BYTES), "up")
        return [
            (*inside, "link", "set", DEVICE, *words),
            (*inside, "address", "add", f"{node.address}/24", "dev", DEVICE),
            (*inside, "link", "set", "lo", "up"),
        ]

    def shape(self, node: Node, direction: Direction) -> list[Command]:
        """The first shaping of one direction: the rate, and on the way up what netem adds."""
        qdisc = (*self._tc(node, direction, "qdisc"), "add", "dev", self._device(node, direction))
        kernel_bps = self.spec.kernel_bps(node.number, direction)
        commands = [self.rate_command(node, direction, kernel_bps)]
        if self.shaper == "htb":
            commands.insert(0, (*qdisc, "root", "handle", "1:", "htb", "default", "1"))
        if self.mechanism == "netem" and direction == "up":
            commands.append((*qdisc, "parent", "1:1", *self._netem()))
        elif self.shaper == "htb":
            limit = ("bfifo", "limit", str(QUEUE_BYTES))
            commands.append((*qdisc, "parent", "1:1", "handle", "10:", *limit))
        return commands

    def rate_command(self, node: Node, direction: Direction, kernel_bps: float) -> Command:
        """Set the rate of one direction, also while packets flow.

        Example:
            >>> from testbed.cluster.spec import parse_cluster
            >>> topology = Topology("t", parse_cluster("nodes=2"))
            >>> " ".join(topology.rate_command(topology.nodes[1], "down", 1e9)[:8])
            'tc -n tswitch class replace dev port2 parent'
        """
        device = self._device(node, direction)
        rate, burst = f"{round(kernel_bps)}bit", str(burst_bytes(kernel_bps, self.shaper))
        if self.shaper == "htb":
            class_ = (*self._tc(node, direction, "class"), "replace", "dev", device)
            buckets = ("burst", burst, "cburst", burst, "quantum", str(PACKET_BYTES))
            line = ("parent", "1:", "classid", "1:1", "htb", "rate", rate, "ceil", rate)
            return (*class_, *line, *buckets)
        qdisc = (*self._tc(node, direction, "qdisc"), "replace", "dev", device)
        bucket = ("burst", burst, "limit", str(QUEUE_BYTES))
        return (*qdisc, "root", "handle", "1:", "tbf", "rate", rate, *bucket)

    def _device(self, node: Node, direction: Direction) -> str:
        return DEVICE if direction == "up" else node.port

    def _tc(self, node: Node, direction: Direction, what: str) -> Command:
        namespace = node.namespace if direction == "up" else self.switch
        return ("tc", "-n", namespace, what)

    def _netem(self) -> Command:
        spec = self.spec
        delay_us = spec.latency_s * spec.dilation * 1e6
        jitter_us = spec.jitter_s * spec.dilation * 1e6
        packets = str(QUEUE_BYTES // MTU)
        words = ["handle", "10:", "netem", "limit", packets, "delay", f"{delay_us:.0f}us"]
        words += [f"{jitter_us:.0f}us"] if jitter_us else []
        words += ["loss", f"{100 * spec.loss_share:g}%"] if spec.loss_share else []
        return tuple(words)

    def hosts(self) -> str:
        """The text of every node's `/etc/hosts`."""
        lines = ["127.0.0.1 localhost", *(f"{node.address} {node.host}" for node in self.nodes)]
        return "\n".join(lines) + "\n"

    def hostfile(self) -> str:
        """The text of Open MPI's hostfile."""
        slots = self.spec.ranks_per_node
        return "".join(f"{node.address} slots={slots}\n" for node in self.nodes)

    @property
    def node_cores(self) -> tuple[tuple[int, ...], ...] | None:
        """The cores of each node; None = all nodes share all of them."""
        wanted = self.spec.cores != "shared" and self.cores
        return pin_cores(self.spec.nodes, self.cores) if wanted else None

    def policy_command(self, node: Node) -> Command:
        """The words before a command that give it, and all that it starts, cores and CPU policy.

        Example:
            >>> topology = Topology("t", ClusterSpec(nodes=2), cores=(0, 1))
            >>> " ".join(topology.policy_command(topology.nodes[1]))
            'taskset -c 1 chrt --batch 0'
        """
        cores = self.node_cores
        pin: Command = ()
        if cores is not None:
            pin = ("taskset", "-c", ",".join(map(str, cores[node.number - 1])))
        return (*pin, *BATCH) if self.spec.cpu_policy == "batch" else pin

    def enter(self, hosts_path: str) -> str:
        """A script called as ssh is, `enter HOST-OR-ADDRESS COMMAND...`, that runs it on a node."""
        cases = "".join(
            f"{n.address}|{n.host}) namespace={n.namespace} host={n.host} "
            f"policy={shlex.quote(shlex.join(self.policy_command(n)))};;\n"
            for n in self.nodes
        )
        return (
            "#!/bin/sh\n"
            "target=$1; shift\n"
            f'case $target in\n{cases}*) echo "no node $target" >&2; exit 1;; esac\n'
            "exec $policy ip netns exec $namespace unshare --uts sh -c "
            f'\'mount --bind {hosts_path} /etc/hosts && hostname "$0" && exec sh -c "$*"\' '
            '$host "$@"\n'
        )


def packet_bytes(kernel_bps: float) -> int:
    """The largest packet that TCP hands to a link that htb shapes.

    Example:
        >>> packet_bytes(1e8), packet_bytes(2.5e9)
        (8192, 40960)
    """
    return min(LARGEST_PACKET_BYTES, max(PACKET_BYTES, round(kernel_bps / 8 * PACKET_S)))


def burst_bytes(kernel_bps: float, shaper: Shaper) -> int:
    """Size of the bucket: bytes that the line may owe a sender after a pause.

    Example:
        >>> burst_bytes(1e9, "htb"), burst_bytes(1e10, "htb"), burst_bytes(1e9, "tbf")
        (3200, 32000, 190536)
    """
    if shaper == "htb":
        return max(HTB_BURST_BYTES, round(kernel_bps / 8 * HTB_BURST_S))
    return LARGEST_PACKET_BYTES + round(kernel_bps / 8 * TIMER_SLACK_S)


# What is recorded of a cluster: asked for, set in the kernel, and how latency is made.


def facts_of(topology: Topology, hostfile: Path, tcp: Mapping[str, list[str]], awake: str) -> Facts:
    """The facts of a cluster that has just come up.

    Args:
        topology: what was built.
        hostfile: Open MPI's.
        tcp: setting -> the values that the nodes have.
        awake: as `idle_polling` gives it.
    """
    spec = topology.spec
    injects = topology.mechanism == "injected"
    links = [
        {
            "node": node.number,
            **{f"{d}_bps": spec.link_bps(node.number, d) for d in WAYS},
            **{f"kernel_{d}_bps": spec.kernel_bps(node.number, d) for d in WAYS},
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
        "shaper": "relay" if topology.mechanism == "relay" else topology.shaper,
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


# Which of the machine's cores each node has; pure.


def pin_cores(num_nodes: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """The cores of each node, as many for each; None where they cannot be distributed evenly.

    With N nodes and C cores node i has core i mod C where C divides N, so that neighbours in a ring
    are on different cores, and cores [i q, (i + 1) q) with q = floor(C / N) where C >= N; cores
    that are left over then are not used. Elsewhere some nodes would have more than others. Cores
    are taken by their numbers, whichever of them are threads of one physical core.

    Args:
        num_nodes: N > 0.
        cores: C > 0 numbers, in order.

    Example:
        >>> pin_cores(4, [0, 1]), pin_cores(2, [0, 1, 2, 3, 4]), pin_cores(3, [0, 1])
        (((0,), (1,), (0,), (1,)), ((0, 1), (2, 3)), None)
    """
    each, num_cores = len(cores) // num_nodes, len(cores)
    if each:
        return tuple(tuple(cores[i * each : (i + 1) * each]) for i in range(num_nodes))
    if num_nodes % num_cores:
        return None
    return tuple((cores[i % num_cores],) for i in range(num_nodes))
