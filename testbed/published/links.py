"""Start-up times and times per byte that papers' authors fitted to their clusters.

Shi, Chu and Li, 2021, IEEE TPDS 32(8) and 2021, INFOCOM; Zhang et al., 2023, ICDCS (their released
code). Four GPUs in a node unless said otherwise; 32 and 64 GPUs were scaled by hand by the authors.
"""

from __future__ import annotations

from typing import Final

from testbed.prediction.link import Link

# Slowdown of k simultaneous messages: 1.5 was published for two; more follow from the line rate
# over what one message reaches (1.6), as in the contention measurements.
SLOWDOWN: Final = tuple(max((k + 1) / 2, k / 1.6) for k in range(1, 9))

TEN_GBIT: Final = {
    8: (5.23e-4, 8.57e-10),
    16: (9.08e-4, 7.40e-10),
    32: (4.04e-3, 8.64e-10),
    64: (7.04e-3, 9.64e-10),
}
INFINIBAND: Final = {
    8: (9.75e-5, 3.06e-10),
    16: (2.36e-4, 4.06e-10),
    32: (4.06e-4, 4.91e-10),
    64: (8.06e-4, 5.89e-10),
}
EIGHT_NODES: Final = (1.369e-3, 1.657e-9)  # 10 Gbit/s, one GPU each
K80: Final = {2: (1.0e-4, 1.7e-9), 4: (1.6e-4, 2.4e-9), 8: (1.11e-3, 1.99e-9)}  # by nodes


def link_of(constants: tuple[float, float], num_workers: int) -> Link:
    """The link with these constants and the published law of simultaneous messages."""
    return Link(
        backend="published",
        num_workers=num_workers,
        latency_s=constants[0],
        seconds_per_byte=constants[1],
        concurrency_slowdown=SLOWDOWN,
    )


def fitted() -> dict[str, Link]:
    """All fitted links across nodes by name."""
    return {
        f"{name}, {num_workers} GPUs": link_of(constants, num_workers)
        for name, table in (("10GbE", TEN_GBIT), ("56Gb IB", INFINIBAND))
        for num_workers, constants in table.items()
    }
