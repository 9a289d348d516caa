"""ByteScheduler: tensors cut into partitions, sent by forward priority under a credit."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.base.axes import SchedulerFacts
from testbed.base.link import Link
from testbed.base.parts import PUBLISHED, Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.base.units import format_bytes
from testbed.scheduling.build import (
    elements_in,
    require_few_messages,
    require_positive,
    sliced_plan,
)


@dataclass(frozen=True)
class ByteSchedulerOptions:
    """Options of `bytescheduler`; the defaults are the paper's 1 M and 4 M float32 elements.

    Attributes:
        partition_kib: largest slice.
        credit_kib: bytes under way before the next choice waits for one to end.
    """

    partition_kib: float = 4096
    credit_kib: float = 16384

    def __post_init__(self) -> None:
        require_positive(
            "bytescheduler", partition_kib=self.partition_kib, credit_kib=self.credit_kib
        )


def plan_bytescheduler(trace: Trace, link: Link, options: ByteSchedulerOptions) -> Plan:
    """Slices of at most `partition_kib`, most urgent first, `credit_kib` of them under way.

        while bytes under way < credit:  start the ready slice whose layer comes first in forward

    Slices under way keep their order, so a slice that becomes the most urgent one waits for at most
    ceil(credit / partition) slices; each slice costs one start-up time.

    Args:
        trace: gives sizes (bytes) and the forward order (`consumers`); times are not used.
        link: not used.
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
        >>> plan.credit_bytes
        8192

    Reference:
        Peng et al., 2019, SOSP (ByteScheduler). Departs: partition and credit are options, not
        tuned by Bayesian optimisation.
    """
    partition_bytes = int(options.partition_kib * 1024)
    credit_bytes = max(1, int(options.credit_kib * 1024))
    limits = [elements_in(trace, i, partition_bytes) for i in range(len(trace.tensors))]
    require_few_messages(trace, limits, "bytescheduler: partition_kib")
    reason = (
        f"partitions of {format_bytes(partition_bytes)} by forward priority, "
        f"{format_bytes(credit_bytes)} under way"
    )
    return sliced_plan("bytescheduler", trace, limits, credit_bytes=credit_bytes, reason=reason)


BYTESCHEDULER = Part(
    name="bytescheduler",
    summary="partitions by forward priority under a credit (partition_kib, credit_kib)",
    origin=PUBLISHED,
    build=plan_bytescheduler,
    options=ByteSchedulerOptions,
    facts=lambda options: SchedulerFacts(
        needs_profile=False,
        crosses_iteration=True,
        tried=("", "partition_kib=8192,credit_kib=32768"),
    ),
)
