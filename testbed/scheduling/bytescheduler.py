"""ByteScheduler: tensors cut into partitions, sent by forward priority under a credit."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.base.axes import SchedulerFacts
from testbed.base.knobs import Range
from testbed.base.link import Link
from testbed.base.parts import PUBLISHED, Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.base.units import format_bytes
from testbed.prediction.algorithms import sums_on_servers
from testbed.scheduling.build import (
    elements_in,
    require_few_messages,
    require_positive,
    sliced_plan,
)

# Partition and credit in float32 elements, as the authors' documentation gives them.
ON_SERVERS = (1_000_000, 4_000_000)
ALL_REDUCE = (8_000_000, 16_000_000)


@dataclass(frozen=True)
class ByteSchedulerOptions:
    """Options of `bytescheduler`.

    Attributes:
        partition_kib: largest slice; None = the published one of the backend's kind: 1 million
            float32 elements on parameter servers, 8 million with all-reduce.
        credit_kib: bytes under way before the next choice waits for one to end; None = likewise, 4
            and 16 million elements.
    """

    partition_kib: float | None = None
    credit_kib: float | None = None

    def __post_init__(self) -> None:
        given = {"partition_kib": self.partition_kib, "credit_kib": self.credit_kib}
        known = {name: value for name, value in given.items() if value is not None}
        require_positive("bytescheduler", **known)


def plan_bytescheduler(trace: Trace, link: Link, options: ByteSchedulerOptions) -> Plan:
    """Slices of at most `partition_kib`, most urgent first, `credit_kib` of them under way.

        while bytes under way < credit:  start the ready slice whose layer comes first in forward

    Slices under way keep their order, so a slice that becomes the most urgent one waits for less
    than credit + partition bytes, in ceil(credit / partition) full slices or more that are smaller;
    each slice costs one start-up time.

    Args:
        trace: gives sizes (bytes) and the forward order (`consumers`); times are not used.
        link: its backend's kind decides what is not given.
        options: partition and credit in KiB.

    Raises:
        UsageError: an option that is not above 0, partitions that cut into more than a million
            messages, or a bad DAG in the trace.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2], num_elements=[5000, 9000])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> plan = make_plan("bytescheduler:partition_kib=4,credit_kib=8", trace, link)
        >>> [(m.priority, m.parts[0].start, m.parts[0].stop) for m in plan.messages]
        [(1, 0, 4096), (1, 4096, 5000), (0, 0, 4096), (0, 4096, 8192), (0, 8192, 9000)]
        >>> plan.credit_bytes, make_plan("bytescheduler", trace, link).credit_bytes
        (8192, 64000000)

    Reference:
        Peng et al., 2019, SOSP (ByteScheduler); defaults: its code and documentation. Departs: the
        authors tune the credit while training, by Bayesian optimisation; here both stay as they
        are, or are searched before (`--tune`). A slice's push and pull are one message, and both
        count against the credit until the pull has ended.
    """
    partition, credit = ON_SERVERS if sums_on_servers(link) else ALL_REDUCE
    partition_bytes = _bytes_of(options.partition_kib, partition)
    credit_bytes = max(1, _bytes_of(options.credit_kib, credit))
    limits = [elements_in(trace, i, partition_bytes) for i in range(len(trace.tensors))]
    require_few_messages(trace, limits, "bytescheduler: partition_kib")
    reason = (
        f"partitions of {format_bytes(partition_bytes)} by forward priority, "
        f"{format_bytes(credit_bytes)} under way"
    )
    return sliced_plan("bytescheduler", trace, limits, credit_bytes=credit_bytes, reason=reason)


def _bytes_of(kib: float | None, num_elements: int) -> int:
    return 4 * num_elements if kib is None else int(kib * 1024)


BYTESCHEDULER = Part(
    name="bytescheduler",
    summary="partitions by forward priority under a credit (partition_kib, credit_kib)",
    origin=PUBLISHED,
    build=plan_bytescheduler,
    options=ByteSchedulerOptions,
    facts=lambda options: SchedulerFacts(
        needs_profile=False,
        crosses_iteration=True,
        tried=("", "partition_kib=4096,credit_kib=16384", "partition_kib=8192,credit_kib=32768"),
    ),
    # From half a million elements to the largest of the authors' search: 32 and 64 million.
    knobs=lambda options: {"partition_kib": Range(2048, 125e3), "credit_kib": Range(2048, 250e3)},
)
