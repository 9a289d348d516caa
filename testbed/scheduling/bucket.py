"""Buckets of a fixed size, as in PyTorch DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from testbed.base.axes import SchedulerFacts
from testbed.base.errors import UsageError
from testbed.base.knobs import Range
from testbed.base.link import Link
from testbed.base.parts import PUBLISHED, Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.timeline import Backward
from testbed.scheduling.build import add_then_close, close_on_timeout, plan_of

MIB = 1 << 20


@dataclass(frozen=True)
class BucketOptions:
    """Options of `bucket`.

    Attributes:
        mib: a bucket closes with the tensor that fills it so far; 0 = every tensor alone.
        first_mib: limit of the first bucket, small so that sending begins early; at most `mib`.
        timeout_ms: close also when backward has run so long since the last bucket closed, and use
            `mib` for the first bucket too; None = never.
    """

    mib: float = 25.0
    first_mib: float = 1.0
    timeout_ms: float | None = None

    def __post_init__(self) -> None:
        if not (self.mib >= 0 and self.first_mib >= 0):
            raise UsageError(
                f"bucket: mib is {self.mib:g} and first_mib {self.first_mib:g}; "
                "expected sizes of 0 or more, as bucket:mib=25,first_mib=1"
            )
        if self.timeout_ms is not None and not 0 < self.timeout_ms < inf:
            raise UsageError(
                f"bucket: timeout_ms is {self.timeout_ms:g}; expected a time above 0, or none"
            )


def plan_bucket(trace: Trace, link: Link, options: BucketOptions) -> Plan:
    """Append gradients in backward order; close a bucket with the gradient that fills it.

        close after l  iff  bytes(bucket) >= mib 2^20            (first bucket: min(first_mib, mib))
                        or  R_l - R(last close) >= timeout_ms / 1000       (if timeout_ms is set)

    Without `timeout_ms` sizes alone decide; with it the plan needs times.

    Args:
        trace: gives sizes (bytes) and, for `timeout_ms`, backward times (s).
        link: not used.
        options: sizes in MiB, time in ms.

    Raises:
        UsageError: a size below 0, or a `timeout_ms` that is not above 0.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2, 3, 3], num_elements=[3 << 20, 4 << 20, 1 << 20, 9])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> plan = make_plan("bucket:mib=4,first_mib=4", trace, link)
        >>> [[part.tensor for part in message.parts] for message in plan.messages]
        [[3, 2], [1, 0]]

    Reference:
        Li et al., 2020, VLDB (PyTorch Distributed; 25 MiB, the first bucket 1 MiB). With
        `timeout_ms`: Zhang et al., 2020, NetAI (64 MiB, 5 ms). Departs: gradients of several dtypes
        fill one bucket together, which is then sent as one message per dtype; PyTorch fills a
        bucket for each dtype. Buckets are not rebuilt after the first iteration: the trace has the
        order of readiness.
    """
    backward = Backward.of(trace)
    limit = options.mib * MIB
    if options.timeout_ms is None:
        stops = add_then_close(backward.num_bytes, limit, min(options.first_mib, options.mib) * MIB)
    else:
        timeout_s = options.timeout_ms * 1e-3
        stops = close_on_timeout(backward.ready_s, backward.num_bytes, limit, timeout_s)
    reason = f"{len(stops)} buckets of {options.mib:g} MiB or just above"
    return plan_of("bucket", trace, stops, reason=reason)


BUCKET = Part(
    name="bucket",
    summary="buckets of fixed size as in PyTorch DDP (mib=25,first_mib=1)",
    origin=PUBLISHED,
    build=plan_bucket,
    options=BucketOptions,
    facts=lambda options: SchedulerFacts(
        needs_profile=options.timeout_ms is not None,
        baseline=True,
        tried=("", "mib=4,first_mib=1", "mib=8,first_mib=1"),
    ),
    knobs=lambda options: {"mib": Range(1, 128), "first_mib": Range(0.25, 32)},
)
