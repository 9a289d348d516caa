"""Gains that abstracts state as a range (PACE, OSF, DeAR), and the throughputs of a survey.

For each abstract the models are the shipped ones and the links those that other papers fitted; the
line says under which of them the largest gain appears.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from testbed.base.files import load_shipped_trace
from testbed.base.link import Link
from testbed.base.trace import Trace
from testbed.prediction.extrapolate import at_bandwidth
from testbed.studies.published.lines import (
    EIGHT_NODES,
    INFINIBAND,
    TEN_GBIT,
    Line,
    fitted,
    gain,
    iteration_s,
    link_of,
    value,
    with_totals,
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
BUFFERS_MIB: Final = (1, 4, 25, 64, 128)
DEAR_GAINS: Final = (1.83, 1.15)
# Trace -> compute of one iteration at DeAR's batch sizes (64, 32, 64, 64).
DEAR_MODELS: Final = {
    "resnet50-v100": 64 / 253.1,
    "densenet201-2080ti": 0.219,
    "inception-v4-2080ti": 2 * 0.1895,
    "bert-base-2080ti": 0.3055,
}
DEAR_BUFFERS_MIB: Final = (4, 8, 16, 25, 50, 100)
BEHIND_BACKWARD: Final = (
    "fused all-reduces hide behind the backward pass but for their last bucket, so that little is "
    "left for the forward pass to hide, while DeAR leaves the last fold and the first spread "
    "exposed"
)
RIVALS: Final = ("wfbp", "bucket", "cycle:mib=64", "mg-wfbp", "bytescheduler")


class Best(NamedTuple):
    """The largest ratio of times and where it was found."""

    ratio: float
    where: str


def pace_lines() -> list[Line]:
    """PACE's largest gain over fused first-in-first-out, for each model over all links.

    Fused FIFO is DDP's buckets of 25 MiB. On the fitted links alone, then with the bandwidth of
    the two links of 8 GPUs varied: the gain is largest where the exchange takes about as long as
    forward and backward together, and falls to nothing on both sides. PACE has its defaults.
    """
    lines = []
    links = fitted()
    varied = {
        f"{name}, {factor:g} x bandwidth": at_bandwidth(links[name], factor)
        for name in ("10GbE, 8 GPUs", "56Gb IB, 8 GPUs")
        for factor in BANDWIDTHS
    }
    for model in MODELS:
        trace = load_shipped_trace(model)
        for what, tried in (("fitted links", links), ("bandwidth varied", varied)):
            best = _best("bucket", "pace", trace, tried)
            lines.append(
                gain(
                    PACE,
                    f"{model}, {what}: {best.where}",
                    "pace over bucket",
                    PACE_GAIN,
                    best.ratio,
                    "",
                )
            )
    return lines


def osf_lines() -> list[Line]:
    """OSF's largest gain in scaling factor over constant buffers, over all models and links.

    The published range needs a buffer that fits neither model nor network: one that holds the
    whole model (nothing overlaps), or one far below a / b (start-ups). Buffers between are near
    OSF's own choice.
    """
    lines = []
    low, high = OSF_GAINS
    reason = (
        "on no fitted link and model is a buffer of this size so far from the best one; the range "
        "appears with smaller and larger buffers"
    )
    for mib in BUFFERS_MIB:
        rival = f"bucket:mib={mib},first_mib={mib}"
        found = [
            (_best(rival, "osf", load_shipped_trace(model), fitted()), model) for model in MODELS
        ]
        best, model = max(found)
        setting = f"{model}, {best.where}"
        quantity = f"osf over a constant buffer of {mib} MiB"
        lines.append(gain(OSF, setting, quantity, low, best.ratio, reason, at_least=low))
        if best.ratio >= high:
            lines.append(gain(OSF, setting, quantity, high, best.ratio, reason, at_least=high))
    return lines


def dear_lines() -> list[Line]:
    """DeAR's gain over each other method, for the four models of its paper on two networks.

    The best of the fusion buffers of 4 to 100 MiB, which the paper searches for. The 56 Gbit/s
    InfiniBand stands for the paper's 100 Gbit/s, for which no constants are published. Only the
    largest gain of each network was published.
    """
    lines = []
    networks = (("10GbE", TEN_GBIT, DEAR_GAINS[0]), ("56Gb IB", INFINIBAND, DEAR_GAINS[1]))
    for network, table, published in networks:
        link = link_of(table[64], 64)
        for model, compute_s in DEAR_MODELS.items():
            trace = with_totals(load_shipped_trace(model), compute_s / 3, 2 * compute_s / 3)
            dear_s = min(iteration_s(f"dear:mib={mib}", trace, link) for mib in DEAR_BUFFERS_MIB)
            for rival in RIVALS:
                ratio = iteration_s(rival, trace, link) / dear_s
                setting = f"{model}, {network}"
                lines.append(
                    gain(DEAR, setting, f"dear over {rival}", published, ratio, BEHIND_BACKWARD)
                )
    return lines


def _best(rival: str, spec: str, trace: Trace, links: dict[str, Link]) -> Best:
    return max(
        Best(iteration_s(rival, trace, link) / iteration_s(spec, trace, link), name)
        for name, link in links.items()
    )


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


def ddl_benchmarks_lines() -> list[Line]:
    """Gains of the merged and prioritised methods over WFBP and BSP, and throughputs.

    The link is that of eight nodes with a GPU each; compute from one GPU's throughput, a third of
    it forward. Columns of parameter servers are left out: their number is not published.
    """
    lines = []
    for name, (batch_size, alone, published) in SURVEY_TABLE.items():
        compute_s = batch_size / alone
        trace = with_totals(load_shipped_trace(name), compute_s / 3, 2 * compute_s / 3)
        link = link_of(EIGHT_NODES, SURVEY_WORKERS)
        samples = SURVEY_WORKERS * batch_size
        ours = {spec: samples / iteration_s(spec, trace, link) for spec in SURVEY_SPECS}
        theirs = dict(zip(SURVEY_SPECS, published, strict=True))
        for fast, slow, reason in (
            ("mg-wfbp", "wfbp", AS_SLOW_AS_BSP),
            ("mg-wfbp", "sequential", AS_SLOW_AS_BSP),
            ("wfbp", "sequential", START_UPS),
            ("bytescheduler", "wfbp", COORDINATION if published[3] < published[1] else PARTITIONS),
        ):
            quantity = f"{fast} over {slow}"
            ratio = ours[fast] / ours[slow]
            lines.append(gain(SURVEY, name, quantity, theirs[fast] / theirs[slow], ratio, reason))
        lines += [value(SURVEY, name, f"{s}, samples/s", theirs[s], ours[s]) for s in SURVEY_SPECS]
    return lines
