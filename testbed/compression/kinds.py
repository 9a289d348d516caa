"""The compressors by name: options, and how they become a compressor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from testbed.compression.by_size import BySize, BySizeOptions
from testbed.compression.casts import Cast, Dense
from testbed.compression.dgc import Dgc
from testbed.compression.feedback import ErrorFeedback, FeedbackOptions
from testbed.compression.gathered import Codec, Gathered
from testbed.compression.gtopk import GTopK
from testbed.compression.levels import Levels, QsgdOptions, TernGradOptions
from testbed.compression.lowrank import AcpSgd, LowRankOptions, PowerSgd
from testbed.compression.natural import Natural
from testbed.compression.oktopk import OkTopK
from testbed.compression.onebit import OneBit
from testbed.compression.protocol import Compressor, CompressorKind
from testbed.compression.quantised import Quantised
from testbed.compression.randomk import RandomK
from testbed.compression.selection import Threshold, TopK, TopKSampled
from testbed.compression.sign import EfSignOptions, Sign, SignOptions
from testbed.compression.warmup import WarmUp, WarmUpOptions


@dataclass(frozen=True)
class NoOptions:
    """For compressors that have nothing to choose."""


def _itself(name: str, summary: str, options: type) -> CompressorKind:
    """A compressor that is its own options."""
    return CompressorKind(name, summary, options, lambda given, inner: given)


def _codec(name: str, summary: str, options: type, codec: Callable[[Any], Codec]) -> CompressorKind:
    return CompressorKind(name, summary, options, lambda given, inner: Gathered(codec(given)))


def _fed_back(given: LowRankOptions, inner: Compressor) -> Compressor:
    return ErrorFeedback(inner) if given.feedback else inner


def _qsgd(given: QsgdOptions) -> Codec:
    return Quantised(Levels(given.bits, given.bucket, given.norm))


def _terngrad(given: TernGradOptions) -> Codec:
    return Quantised(Levels(2, given.bucket, "max", given.clip_sigmas))


NONE = CompressorKind("none", "values as they are", NoOptions, lambda given, inner: Dense())
FP16 = CompressorKind(
    "fp16", "rounded to 16 bits, averaged in them", NoOptions, lambda given, inner: Cast("fp16")
)
BF16 = CompressorKind(
    "bf16", "rounded to bfloat16, averaged in it", NoOptions, lambda given, inner: Cast("bf16")
)
TOPK = _codec("topk", "the largest share (ratio), exactly", TopK, lambda given: given)
TOPK_SAMPLED = _codec(
    "topk-sampled",
    "about the largest share (ratio), by a threshold from a sample",
    TopKSampled,
    lambda given: given,
)
THRESHOLD = _codec(
    "threshold", "all of a magnitude and above (value)", Threshold, lambda given: given
)
RANDOMK = _itself(
    "randomk", "a random share (ratio), the same on all ranks, summed (scale)", RandomK
)
DGC = _itself(
    "dgc", "deep gradient compression (ratio, momentum, clip, masking, warmup_steps)", Dgc
)
GTOPK = _itself(
    "gtopk", "global top-k by pairwise merging; write ef+gtopk (ratio, residual)", GTopK
)
OKTOPK = _itself(
    "oktopk", "top-k in balanced regions; write ef+oktopk (ratio, every, rebalance)", OkTopK
)
SIGN = _codec(
    "sign",
    "signs by majority vote (vote, scaled, bucket)",
    SignOptions,
    lambda given: Sign(given.vote, given.scaled, given.bucket),
)
EF_SIGN = CompressorKind(
    "ef-sign",
    "scaled signs with error feedback (vote, bucket)",
    EfSignOptions,
    lambda given, inner: ErrorFeedback(Gathered(Sign(given.vote, True, given.bucket))),
)
ONEBIT = _codec(
    "onebit",
    "signs and a mean for each of the two (bucket)",
    OneBit,
    lambda given: Quantised(given),
)
QSGD = _codec("qsgd", "random rounding to levels (bits, bucket, norm)", QsgdOptions, _qsgd)
TERNGRAD = _codec(
    "terngrad", "random rounding to 0 or +-scale (clip_sigmas, bucket)", TernGradOptions, _terngrad
)
NATURAL = _codec(
    "natural", "random rounding to powers of two", NoOptions, lambda given: Quantised(Natural())
)
POWERSGD = CompressorKind(
    "powersgd",
    "low-rank factors by power iteration, two sums (rank, feedback)",
    LowRankOptions,
    lambda given, inner: _fed_back(given, PowerSgd(given.rank)),
)
ACP_SGD = CompressorKind(
    "acp-sgd",
    "low-rank factors in turn, one sum (rank, feedback)",
    LowRankOptions,
    lambda given, inner: _fed_back(given, AcpSgd(given.rank)),
)
EF = CompressorKind(
    "ef",
    "error feedback around the compressor to its right (units)",
    FeedbackOptions,
    lambda given, inner: ErrorFeedback(inner, given),
    wraps=True,
)
WARMUP = CompressorKind(
    "warmup",
    "a ratio that falls to that on its right (stage_steps, start, factor)",
    WarmUpOptions,
    lambda given, inner: WarmUp(inner, given),
    wraps=True,
)
BY_SIZE = CompressorKind(
    "by-size",
    "the compressor to its right for large messages only (min_elements, small)",
    BySizeOptions,
    lambda given, inner: BySize(inner, given),
    wraps=True,
)
