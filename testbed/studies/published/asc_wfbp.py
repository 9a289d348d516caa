"""ASC-WFBP's table: seconds per iteration on 8 nodes of 4 GPUs, 10 Gbit/s Ethernet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from testbed.base.files import load_shipped_trace
from testbed.base.link import Link
from testbed.prediction.contention import first_in_first_out
from testbed.studies.published.lines import Line, gain, iteration_s, of_rules, value
from testbed.studies.published.links import EIGHT_NODES, SLOWDOWN, TEN_GBIT, link_of

PAPER: Final = "ASC-WFBP (Shi, Chu and Li, 2021, INFOCOM), 32 GPUs"
NUM_WORKERS: Final = 32
LINE_RATE_BPS: Final = 9.43e9  # measured by the authors

# Trace -> compute and exposed time of WFBP, MG-WFBP and ASC-WFBP, and the bound on the speed-up.
TABLE: Final = {
    "resnet152-2080ti": (0.27374, 0.68220, 0.43614, 0.25056, 17.5),
    "densenet201-2080ti": (0.21888, 0.55930, 0.15627, 0.09482, 32.0),
    "inception-v4-2080ti": (0.18946, 0.52914, 0.32042, 0.18763, 17.2),
    "bert-base-2080ti": (0.30549, 0.70472, 0.75686, 0.61874, 11.5),
}
OVER_ESTIMATE: Final = "MG planned with a = 4.04 ms"
MG_LOSES: Final = (
    "under the constants that it plans with the rule never loses to WFBP; the published loss on "
    "BERT-Base needs costs outside the model (copies into the merged buffer) or other constants"
)


def asc_wfbp_lines(o_s: float = 0.0) -> list[Line]:
    """Gains of ASC over both others, of MG over WFBP, total times, and the bound on the speed-up.

    The link is the one that the authors fitted on eight nodes. MG-WFBP is there twice: planned with
    the true start-up time, and with the one that their code has for 32 GPUs, three times as large:
    then it merges nearly everything, as the published times suggest.

    Args:
        o_s: processor time of the computing thread for one message.
    """
    link = link_of(EIGHT_NODES, NUM_WORKERS, o_s)
    believed = link_of(TEN_GBIT[32], NUM_WORKERS, o_s)
    lines = []
    for name, (compute_s, *exposed, bound) in TABLE.items():
        trace = load_shipped_trace(name)
        wfbp, mg, asc = (compute_s + each for each in exposed)
        ours = {s: iteration_s(s, trace, link) for s in ("wfbp", "mg-wfbp", "asc-wfbp", "optimal")}
        merged_s = iteration_s("mg-wfbp", trace, link, believed)
        setting = f"{name}, 10GbE"
        over = f"{setting}, {OVER_ESTIMATE}"
        variant = gain(
            *(PAPER, over, "asc-wfbp over mg-wfbp", mg / asc, merged_s / ours["asc-wfbp"], ""),
            left_out="variant",
        )
        merged = value(PAPER, over, "mg-wfbp, seconds", mg, merged_s)
        best = value(
            *(PAPER, setting, "optimal (serial) for asc-wfbp, seconds", asc, ours["optimal"])
        )
        lines += [
            _over("asc-wfbp", "wfbp", setting, wfbp / asc, ours),
            _over("asc-wfbp", "mg-wfbp", setting, mg / asc, ours),
            variant,
            _over("mg-wfbp", "wfbp", setting, wfbp / mg, ours),
            value(PAPER, setting, "wfbp, seconds", wfbp, ours["wfbp"]),
            value(PAPER, setting, "mg-wfbp, seconds", mg, ours["mg-wfbp"]),
            msgspec.structs.replace(merged, left_out="variant"),
            value(PAPER, setting, "asc-wfbp, seconds", asc, ours["asc-wfbp"]),
            msgspec.structs.replace(best, left_out="variant"),
            msgspec.structs.replace(
                value(PAPER, setting, "bound on the speed-up", bound, _bound(name)),
                left_out="constant",
            ),
        ]
    return lines


def _over(fast: str, slow: str, setting: str, published: float, ours: Mapping[str, float]) -> Line:
    """A gain among the methods of the table."""
    return gain(
        *(PAPER, setting, f"{fast} over {slow}", published, ours[slow] / ours[fast], MG_LOSES),
        left_out=of_rules(fast, slow),
    )


def _bound(name: str) -> float:
    """P (t_f + t_b) / (t_f + t_b + t_c - min(t_b, t_c)), t_c = 2 x bits / line rate."""
    trace = load_shipped_trace(name)
    exchange_s = 2 * 8 * trace.num_bytes / LINE_RATE_BPS
    compute_s = trace.forward_s + trace.backward_s
    hidden_s = min(trace.backward_s, exchange_s)
    return NUM_WORKERS * compute_s / (compute_s + exchange_s - hidden_s)


# Simultaneous all-reduces of 100 MiB over MPI on 10 Gbit/s Ethernet: what the law says of them.

CONTENTION_PAPER: Final = (
    "Contention (Wang, Shi, Wang and Chu, 2020: scheduling of several jobs), ring, MPI, 10GbE"
)

# Nodes -> seconds of k = 1 .. 8 all-reduces at once.
CONTENTION_TABLE: Final = {
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


def contention_lines(o_s: float = 0.0) -> list[Line]:
    """Whether k at once beat k in turn, and how long they take.

    The link is the one message's own time, all of it transfer (the start-up is below 1 % of it).
    Ours prints the law's constants, `SLOWDOWN`; nothing of it is in a count.

    Args:
        o_s: not used: nothing is computed here.
    """
    lines = []
    for nodes, times_s in CONTENTION_TABLE.items():
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
                gain(CONTENTION_PAPER, setting, quantity, theirs, in_turn_s / ours_s, ""),
                value(CONTENTION_PAPER, setting, "seconds", times_s[count - 1], ours_s),
            ]
    return [msgspec.structs.replace(line, left_out="constant") for line in lines]
