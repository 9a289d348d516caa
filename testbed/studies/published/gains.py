"""Gains that abstracts state as a range (PACE, OSF, DeAR), and the throughputs of a survey.

For each abstract the models are the shipped ones and the links those that other papers fitted; the
line says under which of them the largest gain appears.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import msgspec

from testbed.base.files import load_shipped_trace
from testbed.base.link import Link
from testbed.base.trace import Trace
from testbed.prediction.extrapolate import at_bandwidth
from testbed.studies.published.lines import (
    SIZES_MIB,
    LeftOut,
    Line,
    gain,
    iteration_s,
    of_rules,
    searched_s,
    value,
    with_totals,
)
from testbed.studies.published.links import (
    EIGHT_NODES,
    INFINIBAND,
    TEN_GBIT,
    beating,
    fitted,
    link_of,
)

PACE: Final = "PACE (Bao, Peng, Chen and Wu, 2020, INFOCOM): up to 36 %"
OSF: Final = "OSF (Liu et al., 2022, WWW): 32.2 to 150 %"
DEAR: Final = "DeAR (Zhang et al., 2023, ICDCS), 64 GPUs: up to 83 % (10GbE), 15 % (100Gb IB)"
MODELS: Final = (
    "resnet50-v100",
    "resnet101-v100",
    "vgg16bn-v100",
    "resnet152-2080ti",
    "densenet201-2080ti",
    "inception-v4-2080ti",
    "bert-base-2080ti",
)
BANDWIDTHS: Final = (0.25, 0.5, 1.0, 2.0)  # multiples of a fitted link's
PACE_GAIN: Final = 1.36
OSF_GAINS: Final = (1.322, 2.5)
BUFFERS_MIB: Final = (1, 4, 25, 64, 128)  # constant ones
DEAR_GAINS: Final = (1.83, 1.15)
# Trace -> compute of one iteration at DeAR's batch sizes (64, 32, 64, 64).
DEAR_MODELS: Final = {
    "resnet50-v100": 64 / 253.1,
    "densenet201-2080ti": 0.219,
    "inception-v4-2080ti": 2 * 0.1895,
    "bert-base-2080ti": 0.3055,
}
BEHIND_BACKWARD: Final = (
    "fused all-reduces hide behind the backward pass but for their last bucket, so that little is "
    "left for the forward pass to hide, while DeAR leaves the last fold and the first spread "
    "exposed"
)
NOT_SO_FAR: Final = (
    "on no fitted link and model is a buffer of this size so far from the best one; the range "
    "appears with smaller and larger buffers"
)
NEVER_AHEAD: Final = "on none of these links is PACE ahead of the best bucket size"
TUNED: Final = f"pace over the best of {len(SIZES_MIB)} bucket sizes"
Timing = Callable[[Trace, Link], float]
RIVALS: Final = ("wfbp", "bucket", "cycle", "mg-wfbp", "bytescheduler")


class Best(NamedTuple):
    """The largest ratio of times and where it was found."""

    ratio: float
    where: str


def pace_lines(o_s: float = 0.0) -> list[Line]:
    """PACE's largest gain over fused first-in-first-out, for each model over all links.

    Fused FIFO is DDP's buckets: of 25 MiB, and of the best of as many sizes as others get, which
    counts. On the fitted links alone, then with the bandwidth of the two links of 8 GPUs varied:
    the gain is largest where the exchange takes about as long as forward and backward together,
    and falls to nothing on both sides. PACE has its defaults.

    Args:
        o_s: processor time of the computing thread for one message.
    """
    lines = []
    links = fitted(o_s)
    varied = {
        f"{name}, {factor:g} x bandwidth": at_bandwidth(links[name], factor)
        for name in ("10GbE, 8 GPUs", "56Gb IB, 8 GPUs")
        for factor in BANDWIDTHS
    }
    for model in MODELS:
        trace = load_shipped_trace(model)
        for what, tried in (("fitted links", links), ("bandwidth varied", varied)):
            own_s = {name: iteration_s("pace", trace, link) for name, link in tried.items()}
            rivals: tuple[tuple[str, Callable[[str, Trace, Link], float], LeftOut], ...] = (
                (TUNED, searched_s, ""),
                ("pace over bucket", iteration_s, "variant"),
            )
            for quantity, rival_s, left_out in rivals:
                best = max(
                    Best(rival_s("bucket", trace, link) / own_s[name], name)
                    for name, link in tried.items()
                )
                line = gain(
                    *(PACE, f"{model}, {what}: {best.where}", quantity, PACE_GAIN),
                    *(best.ratio, NEVER_AHEAD),
                    between=(0.0, PACE_GAIN),
                    left_out=left_out,
                )
                lines.append(msgspec.structs.replace(line, beats_wire=best.where in beating()))
    return lines


def osf_lines(o_s: float = 0.0) -> list[Line]:
    """OSF's largest gain in scaling factor over constant buffers, over all models and links.

    The published range needs a buffer that fits neither model nor network: one that holds the
    whole model (nothing overlaps), or one far below a / b (start-ups). Buffers between are near
    OSF's own choice. The last line takes the best of as many sizes as others get, for each model
    and link.

    Args:
        o_s: processor time of the computing thread for one message.
    """
    lines = []
    low, high = OSF_GAINS
    rivals: list[tuple[str, Timing]] = [
        (f"a constant buffer of {mib} MiB", partial(iteration_s, _whole_buffers(mib)))
        for mib in BUFFERS_MIB
    ]
    rivals.append((f"the best of {len(SIZES_MIB)} constant buffers", partial(searched_s, "bucket")))
    traces = {model: load_shipped_trace(model) for model in MODELS}
    links = fitted(o_s)
    for rival, rival_s in rivals:
        best, model = max(
            (Best(rival_s(trace, link) / iteration_s("osf", trace, link), name), model)
            for model, trace in traces.items()
            for name, link in links.items()
        )
        line = gain(
            *(OSF, f"{model}, {best.where}", f"osf over {rival}", low, best.ratio, NOT_SO_FAR),
            at_least=low,
            between=(low, high),
        )
        lines.append(msgspec.structs.replace(line, beats_wire=best.where in beating()))
    return lines


def _whole_buffers(mib: int) -> str:
    return f"bucket:mib={mib},first_mib={mib}"


def dear_lines(o_s: float = 0.0) -> list[Line]:
    """DeAR's gain over each other method, for the four models of its paper on two networks.

    The best of the fusion buffers of 4 to 100 MiB, which the paper searches for; each rival that
    has a size gets the same number of candidates. The 56 Gbit/s InfiniBand stands for the paper's
    100 Gbit/s, for which no constants are published. Only the largest gain of each network was
    published.

    Args:
        o_s: processor time of the computing thread for one message.
    """
    lines = []
    networks = (("10GbE", TEN_GBIT, DEAR_GAINS[0]), ("56Gb IB", INFINIBAND, DEAR_GAINS[1]))
    for network, table, published in networks:
        link = link_of(table[64], 64, o_s)
        for model, compute_s in DEAR_MODELS.items():
            trace = with_totals(load_shipped_trace(model), compute_s / 3, 2 * compute_s / 3)
            dear_s = searched_s("dear", trace, link)
            for rival in RIVALS:
                line = gain(
                    *(DEAR, f"{model}, {network}", f"dear over {rival}", published),
                    *(searched_s(rival, trace, link) / dear_s, BEHIND_BACKWARD),
                    between=(0.0, published),
                )
                beats = f"{network}, 64 GPUs" in beating()
                lines.append(msgspec.structs.replace(line, beats_wire=beats))
    return lines


# Samples per second of all-reduce methods on 32 GPUs, 10 Gbit/s Ethernet.

SURVEY: Final = "Survey (Shi et al., 2020, arXiv 2005.13247), 32 GPUs = 8 nodes x 4, 10GbE"
SURVEY_WORKERS: Final = 32
# Trace -> batch, samples/s of one GPU; then of BSP, WFBP, MG-WFBP and ByteScheduler on all.
SURVEY_TABLE: Final = {
    "resnet50-v100": (64, 253.1, (4921, 5113, 6884, 4754)),
    "bert-base-2080ti": (64, 212.8, (1927, 2013, 1926, 2260)),
}
SURVEY_SPECS: Final = ("sequential", "wfbp", "mg-wfbp", "bytescheduler")
AS_SLOW_AS_BSP: Final = (
    "MG-WFBP was measured as slow as BSP on this model, as if it had merged everything or hidden "
    "nothing; with the constants of any number of GPUs the rule makes two to nine messages of it "
    "and hides some of them"
)
START_UPS: Final = (
    "start-ups of 1.37 ms for each of 161 or 206 messages cost more than the overlap gains; with "
    "0.95 ms WFBP is 4 % ahead of BSP on ResNet-50 and still 3 % behind on BERT-Base"
)
COORDINATION: Final = (
    "measured, ByteScheduler is slower than WFBP on ResNet-50; a + b M has no cost for the "
    "coordination between workers that a priority queue needs"
)
PARTITIONS: Final = (
    "partitions of 4 MiB pay a start-up each; with partitions of 16 MiB it is 5 % ahead of WFBP"
)


def ddl_benchmarks_lines(o_s: float = 0.0) -> list[Line]:
    """Gains of the merged and prioritised methods over WFBP and BSP, and throughputs.

    The link is that of eight nodes with a GPU each; compute from one GPU's throughput, a third of
    it forward. Columns of parameter servers are left out: their number is not published.
    ByteScheduler has the best of as many sizes as other methods get.

    Args:
        o_s: processor time of the computing thread for one message.
    """
    lines = []
    for name, (batch_size, alone, published) in SURVEY_TABLE.items():
        compute_s = batch_size / alone
        trace = with_totals(load_shipped_trace(name), compute_s / 3, 2 * compute_s / 3)
        link = link_of(EIGHT_NODES, SURVEY_WORKERS, o_s)
        samples = SURVEY_WORKERS * batch_size
        ours = {spec: samples / searched_s(spec, trace, link) for spec in SURVEY_SPECS}
        theirs = dict(zip(SURVEY_SPECS, published, strict=True))
        for fast, slow, reason in (
            ("mg-wfbp", "wfbp", AS_SLOW_AS_BSP),
            ("mg-wfbp", "sequential", AS_SLOW_AS_BSP),
            ("wfbp", "sequential", START_UPS),
            ("bytescheduler", "wfbp", COORDINATION if published[3] < published[1] else PARTITIONS),
        ):
            quantity = f"{fast} over {slow}"
            ratio = ours[fast] / ours[slow]
            lines.append(
                gain(
                    *(SURVEY, name, quantity, theirs[fast] / theirs[slow], ratio, reason),
                    left_out=of_rules(fast, slow),
                )
            )
        lines += [value(SURVEY, name, f"{s}, samples/s", theirs[s], ours[s]) for s in SURVEY_SPECS]
    return lines
