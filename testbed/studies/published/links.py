"""Start-up times and times per byte that papers' authors fitted to their clusters.

Shi, Chu and Li, 2021, IEEE TPDS 32(8) and 2021, INFOCOM; Zhang et al., 2023, ICDCS (their released
code). Four GPUs in a node unless said otherwise; 32 and 64 GPUs were scaled by hand by the authors.
"""

from __future__ import annotations

from typing import Final

from testbed.base.link import Link

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


# Processor time of the computing thread for one message (LogP's o), an assumption: it was chosen in
# sight of WFBP's times on InfiniBand in the table of MG-WFBP, and is not fitted to any line.
OVERHEAD_S: Final = 3e-4
GPUS_PER_NODE: Final = 4
LINE_RATE_BPS: Final = {"10GbE": 10e9, "56Gb IB": 56e9}


def beats_wire(network: str, num_nodes: int, seconds_per_byte: float) -> bool:
    """Whether a time per byte is below what any sum over the network takes.

    Each of N nodes has to send and to receive 2 (N - 1) / N of a message for its sum:

        b >= 2 (N - 1) / N x 8 / line rate

    Args:
        network: key of `LINE_RATE_BPS`.
        num_nodes: N, each with one interface.
        seconds_per_byte: b, as fitted.

    Example:
        >>> beats_wire("10GbE", 4, 7.4e-10), beats_wire("10GbE", 2, 8.57e-10)
        (True, False)

    Reference:
        Patarasu and Yuan, 2009, J. Parallel Distrib. Comput. (the bound).
    """
    least = 2 * (num_nodes - 1) / num_nodes * 8 / LINE_RATE_BPS[network]
    return seconds_per_byte < least


def link_of(constants: tuple[float, float], num_workers: int, o_s: float = 0.0) -> Link:
    """The link with these constants and the published law of simultaneous messages.

    Args:
        constants: a and b.
        num_workers: n.
        o_s: processor time of the computing thread for one message.
    """
    return Link(
        backend="published",
        num_workers=num_workers,
        latency_s=constants[0],
        seconds_per_byte=constants[1],
        concurrency_slowdown=SLOWDOWN,
        submit_s=o_s,
    )


NETWORKS: Final = (("10GbE", TEN_GBIT), ("56Gb IB", INFINIBAND))


def fitted(o_s: float = 0.0) -> dict[str, Link]:
    """All fitted links across nodes by name; `o_s` as `link_of` has it."""
    return {
        f"{name}, {num_workers} GPUs": link_of(constants, num_workers, o_s)
        for name, table in NETWORKS
        for num_workers, constants in table.items()
    }


def beating() -> frozenset[str]:
    """Names of the fitted links whose time per byte beats the wire.

    Example:
        >>> sorted(beating())
        ['10GbE, 16 GPUs', '10GbE, 32 GPUs', '10GbE, 64 GPUs']
    """
    return frozenset(
        f"{name}, {num_workers} GPUs"
        for name, table in NETWORKS
        for num_workers, (_, per_byte) in table.items()
        if beats_wire(name, num_workers // GPUS_PER_NODE, per_byte)
    )
