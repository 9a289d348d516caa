"""Simultaneous all-reduces of 100 MiB over MPI on 10 Gbit/s Ethernet: what the law says of them."""

from __future__ import annotations

from typing import Final

from testbed.prediction.contention import first_in_first_out
from testbed.prediction.link import Link
from testbed.published.lines import Line, gain, value
from testbed.published.links import SLOWDOWN

PAPER: Final = (
    "Contention (Wang, Shi, Wang and Chu, 2020: scheduling of several jobs), ring, MPI, 10GbE"
)

# Nodes -> seconds of k = 1 .. 8 all-reduces at once.
TABLE: Final = {
    2: (0.179, 0.229, 0.301, 0.389, 0.476, 0.688, 0.875, 0.986),
    3: (0.196, 0.288, 0.399, 0.498, 0.624, 0.791, 0.917, 1.078),
    4: (0.218, 0.324, 0.442, 0.568, 0.702, 0.885, 1.123, 1.271),
    5: (0.245, 0.359, 0.478, 0.594, 0.761, 0.961, 1.126, 1.351),
    6: (0.244, 0.370, 0.485, 0.622, 0.777, 0.939, 1.153, 1.362),
    7: (0.252, 0.384, 0.513, 0.649, 0.801, 0.999, 1.246, 1.474),
    8: (0.294, 0.378, 0.503, 0.648, 0.873, 0.980, 1.227, 1.490),
}
NUM_BYTES: Final = 100 << 20
SHOWN: Final = (2, 4, 8)


def contention_lines() -> list[Line]:
    """Whether k at once beat k in turn, and how long they take.

    The link is the one message's own time, all of it transfer (the start-up is below 1 % of it).
    """
    lines = []
    for nodes, times_s in TABLE.items():
        link = Link(
            backend="published",
            num_workers=nodes,
            latency_s=0.0,
            seconds_per_byte=times_s[0] / NUM_BYTES,
            concurrency_slowdown=SLOWDOWN,
        )
        for count in SHOWN:
            phases = [(0.0, link.time_s(NUM_BYTES))] * count
            ours_s = max(first_in_first_out([0.0] * count, phases, count, link.slowdown).end_s)
            setting = f"{nodes} nodes, {count} at once"
            in_turn_s = count * times_s[0]
            quantity = "at once over in turn"
            theirs = in_turn_s / times_s[count - 1]
            lines += [
                gain(PAPER, setting, quantity, theirs, in_turn_s / ours_s, ""),
                value(PAPER, setting, "seconds", times_s[count - 1], ours_s),
            ]
    return lines
