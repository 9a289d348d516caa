"""What kind of backend a plan is for: papers give defaults for servers and for all-reduce."""

from __future__ import annotations

from testbed.base.axes import BACKENDS
from testbed.base.link import Link
from testbed.prediction.algorithms import Server, parse_algorithm


def sums_on_servers(link: Link) -> bool:
    """Whether the link's backend sums on parameter servers, as the algorithm that it declares says.

    A backend that is not known here, or declares no algorithm, counts as an all-reduce.

    Example:
        >>> link = Link(backend="zmq-ps", num_workers=2, latency_s=0, seconds_per_byte=0)
        >>> sums_on_servers(link)
        True
    """
    found = BACKENDS.find(link.backend)
    algorithm = None if found is None else found.facts.algorithm
    return algorithm is not None and isinstance(parse_algorithm(algorithm), Server)
