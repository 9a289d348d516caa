"""What planners for sparse messages take selecting and gathering to cost."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from testbed.errors import UsageError
from testbed.prediction.algorithms import Algorithm, algorithm_of, parse_algorithm
from testbed.prediction.codec import RoundCost
from testbed.prediction.exchange import round_phases_s
from testbed.prediction.link import Link

PAIR_BYTES = 8  # a value and an index
VALUE_BYTES = 4


@dataclass(frozen=True)
class SparseCost:
    """Times of a top-k message of p elements, by the law of the papers.

        t_s(p) = g p log2 p;  t_c(p, rho) = a gather of min(8 rho p, 4 p) bytes

    Attributes:
        link: measured with dense sums.
        algorithm: that its backend runs.
        select_s: g, seconds per element and level.

    Example:
        >>> link = Link(backend="gloo", num_workers=8, latency_s=0.01, seconds_per_byte=1e-9)
        >>> cost = SparseCost.of(link, select_ns=0.000219)
        >>> round(cost.select_time_s(10**6) * 1e6, 2)
        4.37
    """

    link: Link
    algorithm: Algorithm
    select_s: float

    @classmethod
    def of(cls, link: Link, select_ns: float) -> SparseCost:
        """On a link, by the algorithm that its backend's name stands for.

        Raises:
            UsageError: a negative or infinite time.
        """
        if not 0 <= select_ns < float("inf"):
            raise UsageError(
                f"select_ns is {select_ns:g}; expected nanoseconds per element and level, 0 or "
                "more, such as 0.2"
            )
        return cls(link, parse_algorithm(algorithm_of(link.backend)), select_ns * 1e-9)

    def select_time_s(self, num_elements: float) -> float:
        """t_s(p)."""
        return self.select_s * num_elements * log2(num_elements) if num_elements > 1 else 0.0

    def phases_s(self, num_elements: float, ratio: float) -> tuple[float, float]:
        """Start-up and transfer time of t_c(p, rho)."""
        if num_elements <= 0:
            return 0.0, 0.0
        sent = min(PAIR_BYTES * ratio, VALUE_BYTES) * num_elements
        return round_phases_s(RoundCost(form="gather", num_bytes=sent), self.link, self.algorithm)

    def exchange_time_s(self, num_elements: float, ratio: float) -> float:
        """t_c(p, rho)."""
        return sum(self.phases_s(num_elements, ratio))
