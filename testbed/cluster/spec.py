"""What cluster is to be emulated, as a frozen value: `nodes=4,rate=10gbit,dilation=10`."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.errors import UsageError
from testbed.spec import parse_options, parse_spec
from testbed.units import parse_rate, parse_seconds


@dataclass(frozen=True)
class ClusterSpec:
    """An emulated cluster; rates and times are those of the cluster that is emulated.

    Attributes:
        nodes: hosts, each in namespaces of its own.
        rate: of each node's link, each direction, as `10gbit`.
        dilation: how many times slower everything happens here than on the emulated cluster.
        latency: of a message, one way, as `50us`.
        ranks_per_node: worker processes on each node.
    """

    nodes: int = 4
    rate: str = "10gbit"
    dilation: float = 1.0
    latency: str = "0"
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        for name in ("nodes", "dilation", "ranks_per_node"):
            value = getattr(self, name)
            if not value > 0:
                raise UsageError(f"cluster: {name} is {value}; expected a number above 0")
        if not self.rate_bps > 0:
            raise UsageError(f"cluster: rate is {self.rate!r}; expected a rate such as 10gbit")
        parse_seconds(self.latency)

    @property
    def rate_bps(self) -> float:
        """Bits per second of each node's link, as emulated."""
        return parse_rate(self.rate)

    @property
    def latency_s(self) -> float:
        """Seconds that a message travels one way, as emulated."""
        return parse_seconds(self.latency)


def parse_cluster(text: str) -> ClusterSpec:
    """The cluster that `key=value,...` describes.

    Raises:
        UsageError: an unknown key (the known ones are listed), or a value that cannot be used.

    Example:
        >>> parse_cluster("nodes=2,rate=1gbit").rate_bps
        1000000000.0
    """
    return parse_options("cluster", parse_spec(f"cluster:{text}").options, ClusterSpec)


def dilation_of(text: str | None) -> float:
    """How many times slower than the emulated cluster things happen; 1 without a cluster."""
    return 1.0 if text is None else parse_cluster(text).dilation
