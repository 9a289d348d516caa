"""The compressors by name: options, and how they become a compressor."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from testbed.base.axes import COMPRESSORS
from testbed.base.errors import UsageError
from testbed.base.spec import PartSpec, parse_options, parse_spec
from testbed.compression.casts import Cast, Dense
from testbed.compression.dgc import Dgc
from testbed.compression.gathered import Codec, Gathered
from testbed.compression.gtopk import GTopK
from testbed.compression.lowrank import AcpSgd, LowRankOptions, PowerSgd
from testbed.compression.oktopk import OkTopK
from testbed.compression.protocol import Compressor, CompressorKind
from testbed.compression.quantize import Levels, Natural, QsgdOptions, Quantised, TernGradOptions
from testbed.compression.randomk import RandomK
from testbed.compression.sign import EfSignOptions, OneBit, Sign
from testbed.compression.topk import Threshold, TopK, TopKSampled
from testbed.compression.wrappers import (
    BySize,
    BySizeOptions,
    ErrorFeedback,
    FeedbackOptions,
    WarmUp,
    WarmUpOptions,
)


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
    Sign,
    lambda given: given,
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


# Compressor specifications: `name:key=value,...`, wrappers before it with `+`: `ef+topk`.


def parse_chain(text: str) -> tuple[PartSpec, ...]:
    """The links of a chain, the compressor itself last.

    A `+` cuts where a name follows, so that numbers may hold one (`1e+3`).

    Raises:
        UsageError: a link has no name, or an option is not `key=value`.

    Example:
        >>> [str(link) for link in parse_chain("ef+topk:ratio=0.01")]
        ['ef', 'topk:ratio=0.01']
    """
    return tuple(parse_spec(link) for link in re.split(r"\+(?![0-9])", text))


def resolve_compressor(text: str) -> Compressor:
    """The compressor of a specification.

    Raises:
        UnknownName: no compressor of this name; the message lists the known ones.
        UsageError: an option that it does not have, a value that it cannot use, a wrapper without
            a compressor to its right, or a compressor with one.

    Example:
        >>> resolve_compressor("ef+topk:ratio=0.01").claims.keeps
        True
    """
    *wrappers, last = parse_chain(text)
    kind: CompressorKind = COMPRESSORS.load(last.name)
    if kind.wraps:
        raise UsageError(f"{last.name!r} needs a compressor to its right; write {last.name}+topk")
    compressor = kind.build(parse_options(last.name, last.options, kind.options), None)
    for link in reversed(wrappers):
        kind = COMPRESSORS.load(link.name)
        if not kind.wraps:
            raise UsageError(
                f"{link.name!r} cannot stand left of another compressor; only wrappers can, for "
                f"example ef+{last.name}"
            )
        compressor = kind.build(parse_options(link.name, link.options, kind.options), compressor)
    return compressor
