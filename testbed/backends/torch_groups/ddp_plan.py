"""Plans as limits of DistributedDataParallel's buckets; pure, without torch.

DDP walks the gradients in the order in which they became ready in the first step, fills one bucket
for each dtype, and closes bucket k with the gradient that brings it to limit k or above; the last
limit counts for all further buckets. A bucket is all-reduced when its last gradient is ready.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from testbed.base.axes import Taken
from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.errors import UsageError
from testbed.base.plan import Message, Plan, TensorSlice

MIB = 1 << 20


def assign_buckets(
    num_bytes: Sequence[int], dtypes: Sequence[str], limits_bytes: Sequence[int]
) -> list[list[int]]:
    """DDP's buckets of gradients that become ready in this order, in the order of their sending.

        close the bucket of a dtype after gradient i  iff  bytes(bucket) >= limit k,
        k = buckets of this dtype closed so far, the last limit for all later ones

    Args:
        num_bytes: of each gradient, in order of readiness.
        dtypes: of each gradient.
        limits_bytes: one or more.

    Example:
        >>> assign_buckets([4, 4, 4, 4, 4], ["float32"] * 5, [8, 4])
        [[0, 1], [2], [3], [4]]

    Reference:
        Li et al., 2020, VLDB; PyTorch 2.13, `compute_bucket_assignment_by_size` of its reducer.
    """
    closed: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    filled = dict.fromkeys(dtypes, 0)
    count = dict.fromkeys(dtypes, 0)
    for index, dtype in enumerate(dtypes):
        filling.setdefault(dtype, []).append(index)
        filled[dtype] += num_bytes[index]
        if filled[dtype] >= limits_bytes[min(count[dtype], len(limits_bytes) - 1)]:
            closed.append(filling.pop(dtype))
            filled[dtype] = 0
            count[dtype] += 1
    return [*closed, *filling.values()]


def limits_of(plan: Plan) -> tuple[int, ...]:
    """The limits in bytes by which DDP's buckets come nearest to a plan's messages.

    Limit k has to lie above bucket k without its last gradient and at or below the whole of it, for
    each dtype. The least whole is taken, which of one dtype is bucket k itself.
    """
    sizes: dict[str, list[int]] = {}
    for message in sorted(plan.messages, key=lambda m: max(_readiness(plan, m))):
        whole = sum(_num_bytes(plan, part.tensor) for part in message.parts)
        sizes.setdefault(plan.dtypes[message.parts[0].tensor], []).append(whole)
    limits = []
    for k in range(max(map(len, sizes.values()))):
        inner = [each[k] for each in sizes.values() if len(each) > k + 1]
        limits.append(min(inner) if inner else max(s[k] for s in sizes.values() if len(s) > k))
    return tuple(limits)


def why_not(plan: Plan) -> str | None:
    """What a plan does that no buckets of DDP can; None: nothing.

    Example:
        >>> plan = Plan(scheduler="s", names=("w",), num_elements=(2,), dtypes=("float32",),
        ...             messages=(Message(parts=(TensorSlice(0, 0, 2),)),))
        >>> why_not(plan), why_not(msgspec.structs.replace(plan, halves=True))
        (None, 'it sends sums in two halves, and DDP all-reduces each bucket at once')
    """
    whole = all(
        part.start == 0 and part.stop == plan.num_elements[part.tensor]
        for message in plan.messages
        for part in message.parts
    )
    reasons = {
        "it sends sums in two halves, and DDP all-reduces each bucket at once": plan.halves,
        "its messages travel during the next forward pass, and DDP waits for all of them at the "
        "end of the backward pass": plan.crosses_iteration,
        "it cuts tensors into slices, and DDP's buckets hold whole gradients": not whole,
        "it sends the most urgent message first, and DDP sends buckets as they fill": (
            plan.order == "priority"
        ),
        "it sends nothing before the backward pass has ended, and DDP sends each bucket when it is "
        "full": plan.after_backward and len(plan.messages) > 1,
        "its messages are for a sparse compressor, and DDP's buckets are dense": any(
            message.ratio is not None for message in plan.messages
        ),
        "it has messages without tensors, or none at all": not (
            plan.messages and all(message.parts for message in plan.messages)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def taken(plan: Plan) -> Taken:
    """What DDP makes of a plan, and the limits that make it do so.

    Raises:
        UsageError: no buckets come near to it; says why.

    Example:
        >>> plan = Plan(scheduler="s", names=("a", "b"), num_elements=(1 << 19, 2), messages=(
        ...     Message(parts=(TensorSlice(1, 0, 2),)), Message(parts=(TensorSlice(0, 0, 1 << 19),))
        ... ), dtypes=("float32", "float32"))
        >>> found = taken(plan)
        >>> found.setting, found.differences
        ('bucket_cap_mb_list=[7.62939453125e-06, 2.0]', ())
    """
    why = why_not(plan)
    if why is not None:
        raise UsageError(
            f"DDP cannot carry out the plan of {plan.scheduler!r}: {why}; expected a plan that "
            "stays in the backward pass, as of wfbp, bucket, mg-wfbp or optimal"
        )
    count = len(plan.names)
    order = range(count - 1, -1, -1)
    limits = limits_of(plan)
    found = assign_buckets(
        [_num_bytes(plan, i) for i in order], [plan.dtypes[i] for i in order], limits
    )
    buckets = [[order[position] for position in bucket] for bucket in found]
    differences = []
    wanted = [{part.tensor for part in message.parts} for message in plan.messages]
    equal = sum(set(bucket) in wanted for bucket in buckets)
    if [set(bucket) for bucket in buckets] != wanted:
        differences.append(
            f"limits alone give {len(buckets)} buckets in place of {len(wanted)} messages, "
            f"{equal} of them equal"
        )
    if plan.num_channels > 1:
        differences.append(
            f"the plan uses {plan.num_channels} channels; how many buckets are under way at once "
            "is up to DDP's process group"
        )
    if plan.tick_s:
        differences.append("buckets leave when they are full, not at the ticks of a loop")
    messages = tuple(
        Message(parts=tuple(TensorSlice(i, 0, plan.num_elements[i]) for i in bucket))
        for bucket in buckets
    )
    kept = msgspec.structs.replace(
        plan,
        messages=messages,
        num_channels=1,
        tick_s=None,
        tick_blocking=False,
        after_backward=False,
        credit_bytes=None,
    )
    return Taken(kept, f"bucket_cap_mb_list={limits_mib(limits)}", tuple(differences))


def limits_mib(limits_bytes: Sequence[int]) -> list[float]:
    """As DDP takes them; a number of bytes over 2^20 is exact, and so is what DDP makes of it."""
    return [limit / MIB for limit in limits_bytes]


def _num_bytes(plan: Plan, tensor: int) -> int:
    return plan.num_elements[tensor] * ELEMENT_BYTES[plan.dtypes[tensor]]


def _readiness(plan: Plan, message: Message) -> list[int]:
    return [len(plan.names) - 1 - part.tensor for part in message.parts]
