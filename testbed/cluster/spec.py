"""What cluster is to be emulated, as a frozen value: `nodes=4,rate=10gbit,dilation=10`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from testbed.base.errors import UsageError
from testbed.base.spec import parse_options, parse_spec
from testbed.base.units import parse_rate, parse_seconds

# Links that change while the cluster runs: `TIME:NODE:RATE`, joined by `+`; pure.

DOWN = "down"


@dataclass(frozen=True)
class Change:
    """One change of one node's link.

    Attributes:
        at_s: seconds since the command in the cluster was started, as emulated.
        node: whose link; None = all nodes'.
        direction: `up`, `down`, or None for both.
        rate: the new rate, as `1gbit`; `down` cuts the node off.
    """

    at_s: float
    node: int | None
    direction: Literal["up", "down"] | None
    rate: str

    @property
    def cuts(self) -> bool:
        """Whether the node is cut off."""
        return self.rate == DOWN

    @property
    def rate_bps(self) -> float:
        """Bits per second, as emulated; 0 where the node is cut off."""
        return 0.0 if self.cuts else parse_rate(self.rate)


def parse_changes(text: str) -> tuple[Change, ...]:
    """Changes in the order of their times.

    Raises:
        UsageError: a piece is no change; shows how one is written.

    Example:
        >>> [(c.at_s, c.node, c.rate_bps) for c in parse_changes("10s:2:1gbit+5:all:100mbit")]
        [(5.0, None, 100000000.0), (10.0, 2, 1000000000.0)]
        >>> parse_changes("10s:up.2:1gbit")[0].direction
        'up'
    """
    pieces = [piece for piece in text.split("+") if piece]
    return tuple(sorted((_parse(piece) for piece in pieces), key=lambda c: c.at_s))


def _parse(piece: str) -> Change:
    words = piece.split(":")
    if len(words) != 3:
        raise _no_change(piece)
    time, where, rate = words
    way, dot, number = where.rpartition(".")
    if way not in ("", "up", "down") or bool(dot) != bool(way):
        raise _no_change(piece)
    if number != "all" and not number.isdigit():
        raise _no_change(piece)
    change = Change(
        parse_seconds(time),
        None if number == "all" else int(number),
        "up" if way == "up" else "down" if way == "down" else None,
        rate,
    )
    if change.cuts and change.direction is not None:  # a port is down in both
        raise _no_change(piece)
    if not change.cuts and not change.rate_bps > 0:
        raise _no_change(piece)
    return change


def _no_change(piece: str) -> UsageError:
    return UsageError(
        f"cluster: change is {piece!r}; expected TIME:NODE:RATE, as 10s:2:1gbit, 10s:up.2:1gbit, "
        "10s:all:1gbit or 10s:2:down (both directions), several joined by +"
    )


MAX_NODES = 250
RELAYED_DILATION = 40.0  # below it the relay takes cores from those who compute

Direction = Literal["up", "down"]
Shaper = Literal["htb", "tbf"]
Mechanism = Literal["netem", "relay", "injected"]
CpuPolicy = Literal["batch", "other"]
Cores = Literal["auto", "pinned", "shared"]
Awake = Literal["auto", "no"]
WAYS: Final[tuple[Direction, ...]] = ("up", "down")


@dataclass(frozen=True)
class ClusterSpec:
    """An emulated cluster; rates and times are those of the cluster that is emulated.

    Attributes:
        nodes: hosts, each in namespaces of its own, numbered from 1.
        rate: of each node's link, each direction, as `10gbit`.
        dilation: how many times slower links, latencies and a replayed workload's compute are here
            than on the emulated cluster. What hosts do themselves (start a message, add, encode) is
            as fast as it is, so that it seems to take a tenth with dilation 10.
        latency: as `50us`, of every packet, one way.
        jitter: the latency varies by up to so much in both directions.
        loss: share of packets that are lost, as `0.1%`; needs netem.
        latency_by: `netem`, the kernel's; `relay`, a process of ours that holds every packet and
            keeps links to their rates, for dilations of 40 and more; None = netem where the kernel
            has it, else the relay. `injected` is no network: every exchange waits once before it
            starts, however many messages its algorithm is made of, as models of a start-up and a
            time per byte have it, and backends that exchange by themselves cannot be held up.
        ranks_per_node: worker processes on each node.
        cpu_policy: `batch` = processes on the nodes get Linux's SCHED_BATCH, see below; `other` =
            they keep the policy under which the testbed was started, as a rule SCHED_OTHER.
        cores: `pinned` = each node's processes stay on its share of this machine's cores, an error
            where they cannot be distributed evenly (`topology.pin_cores`); `shared` = any node may
            be on any core; `auto` = pinned where possible.
        awake: `auto` = idle cores of this machine poll instead of halting while the cluster is up,
            where that is allowed (see `system.idle_polling`); `no` = they halt as they always do.
        change: rates that change while it runs, `TIME:NODE:RATE+...`; see `Change`.
        links: (direction, node, rate) of links that differ, written `up.3=1gbit`, `down.3=1gbit`,
            or `rate.3=1gbit` for both.

    The nodes of a real cluster have cores of their own; here they share a few. Under the usual
    policy a thread that a message wakes may preempt another node's thread at once;
    `p3` on gloo (643 messages a step, four nodes on two cores) then spent a core on polling and
    took 474 ms a step, 217 under `batch`. Under `batch` a thread computes until it waits or its
    slice is over, and a thread that wakes takes an idle core or waits for one. Where cores are
    pinned, a node's threads do not move to those of others: some 50 steps of `p3` on mpi-ring
    took 150 to 187 ms, 160 to 224 where they were shared.
    """

    nodes: int = 4
    rate: str = "10gbit"
    dilation: float = 1.0
    latency: str = "0"
    jitter: str = "0"
    loss: str = "0"
    latency_by: Mechanism | None = None
    ranks_per_node: int = 1
    cpu_policy: CpuPolicy = "batch"
    cores: Cores = "auto"
    awake: Awake = "auto"
    change: str = ""
    links: tuple[tuple[Direction, int, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "dilation", "ranks_per_node"):
            value = getattr(self, name)
            if not value > 0:
                raise UsageError(f"cluster: {name} is {value}; expected a number above 0")
        if self.nodes > MAX_NODES:
            raise UsageError(f"cluster: nodes is {self.nodes}; expected at most {MAX_NODES}")
        for text in (self.rate, *(rate for _, _, rate in self.links)):
            if not parse_rate(text) > 0:
                raise UsageError(f"cluster: rate is {text!r}; expected a rate such as 10gbit")
        for node in [*(n for _, n, _ in self.links), *(c.node for c in self.changes if c.node)]:
            if not 1 <= node <= self.nodes:
                raise UsageError(f"cluster: node is {node}; expected 1 .. {self.nodes}")
        if self.jitter_s > self.latency_s:
            raise UsageError(
                f"cluster: jitter is {self.jitter} and latency {self.latency}; expected no more "
                "jitter than latency, or messages would arrive before they leave"
            )
        if not 0 <= self.loss_share < 1:
            raise UsageError(f"cluster: loss is {self.loss!r}; expected a share such as 0.1%")
        if self.loss_share and self.latency_by not in (None, "netem"):
            raise UsageError(f"cluster: loss needs netem, and latency_by is {self.latency_by!r}")
        if self.latency_by == "relay":
            self.check_relayed()

    def check_relayed(self) -> None:
        """See that the relay may make the latency.

        Raises:
            UsageError: it would take too much of the cores, or links are to change under it.
        """
        if self.dilation < RELAYED_DILATION:
            raise UsageError(
                f"cluster: latency is {self.latency}, and without the kernel's netem a process of "
                "the testbed holds every packet, which takes time of the cores that compute: "
                f"dilation is {self.dilation:g}; expected {RELAYED_DILATION:g} or more; write "
                f"dilation={RELAYED_DILATION:g} (latency stays as it is emulated), or leave out "
                "latency"
            )
        if self.change:
            raise UsageError(
                f"cluster: change is {self.change!r} beside latency={self.latency}; links that a "
                "relay delays keep their rates; leave out one of the two"
            )

    @property
    def rate_bps(self) -> float:
        """Bits per second of a node's link, as emulated, where no other is given."""
        return parse_rate(self.rate)

    @property
    def latency_s(self) -> float:
        """Seconds that a message travels one way, as emulated."""
        return parse_seconds(self.latency)

    @property
    def jitter_s(self) -> float:
        """Largest deviation from the latency, as emulated."""
        return parse_seconds(self.jitter)

    @property
    def loss_share(self) -> float:
        """Share of packets that are lost."""
        try:
            return float(self.loss.removesuffix("%")) / (100 if self.loss.endswith("%") else 1)
        except ValueError:
            raise UsageError(
                f"cluster: loss is {self.loss!r}; expected a share such as 0.1%"
            ) from None

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes while it runs, in the order of their times."""
        return parse_changes(self.change)

    @property
    def places(self) -> int:
        """Processes that the nodes take together."""
        return self.nodes * self.ranks_per_node

    def link_bps(self, node: int, direction: Direction) -> float:
        """Bits per second of one direction of a node's link, as emulated.

        Example:
            >>> spec = parse_cluster("nodes=2,rate=1gbit,up.2=100mbit")
            >>> spec.link_bps(2, "up"), spec.link_bps(2, "down")
            (100000000.0, 1000000000.0)
        """
        own = {(d, n): rate for d, n, rate in self.links}
        return parse_rate(own.get((direction, node), self.rate))

    def kernel_bps(self, node: int, direction: Direction) -> float:
        """Bits per second that the kernel is set to: the emulated rate over the dilation."""
        return self.link_bps(node, direction) / self.dilation

    @property
    def slowest_kernel_bps(self) -> float:
        """The kernel's rate of the slowest direction of any link."""
        return min(self.kernel_bps(n, d) for n in range(1, self.nodes + 1) for d in WAYS)

    def text(self) -> str:
        """What `parse_cluster` reads, without defaults other than nodes and rate.

        Example:
            >>> parse_cluster("dilation=10,nodes=4,rate.2=1gbit").text()
            'nodes=4,rate=10gbit,dilation=10,up.2=1gbit,down.2=1gbit'
        """
        default = ClusterSpec()
        pieces = []
        for name in ClusterSpec.__dataclass_fields__:
            value = getattr(self, name)
            told = name in ("nodes", "rate") or value != getattr(default, name)
            if told and name != "links":
                pieces.append(f"{name}={value:g}" if name == "dilation" else f"{name}={value}")
        pieces += [f"{direction}.{node}={rate}" for direction, node, rate in self.links]
        return ",".join(pieces)


def parse_cluster(text: str) -> ClusterSpec:
    """The cluster that `key=value,...` describes.

    Raises:
        UsageError: an unknown key (the known ones are listed), or a value that cannot be used.

    Example:
        >>> parse_cluster("nodes=2,rate=1gbit").rate_bps
        1000000000.0
    """
    options = parse_spec(f"cluster:{text}").options
    # A link of its own has a dot in its key; `links` is how they are held, not how they are given.
    own = {key: value for key, value in options.items() if "." in key or key == "links"}
    plain = {key: value for key, value in options.items() if key not in own}
    return replace(parse_options("cluster", plain, ClusterSpec), links=_links(own))


def _links(options: Mapping[str, str]) -> tuple[tuple[Direction, int, str], ...]:
    found: list[tuple[Direction, int, str]] = []
    for key, rate in options.items():
        match = re.fullmatch(r"(rate|up|down)\.(\d+)", key)
        if match is None:
            raise UsageError(
                f"cluster: no option {key!r}; a link of its own is written rate.NODE, up.NODE or "
                "down.NODE, as rate.2=1gbit"
            )
        node = int(match[2])
        if match[1] in ("rate", "up"):
            found.append(("up", node, rate))
        if match[1] in ("rate", "down"):
            found.append(("down", node, rate))
    return tuple(found)


def dilation_of(text: str | None) -> float:
    """How many times slower than the emulated cluster things happen; 1 without a cluster."""
    return 1.0 if text is None else parse_cluster(text).dilation
