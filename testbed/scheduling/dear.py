"""DeAR: reduce-scatter behind the backward pass, all-gather behind the next forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from testbed.base.axes import SchedulerFacts
from testbed.base.knobs import Range
from testbed.base.link import Link
from testbed.base.parts import PUBLISHED, Part
from testbed.base.plan import Message, Plan, TensorSlice
from testbed.base.trace import Trace
from testbed.base.units import format_bytes
from testbed.prediction.cross_iteration import forward_order
from testbed.scheduling.build import close_before_exceed, plan_for, require_positive


@dataclass(frozen=True)
class DearOptions:
    """Options of `dear`.

    Attributes:
        mib: fusion threshold: a group is closed before the module that would bring it there.
    """

    mib: float = 25

    def __post_init__(self) -> None:
        require_positive("dear", mib=self.mib)


def plan_dear(trace: Trace, link: Link, options: DearOptions) -> Plan:
    """Groups in forward order; each is folded during backward and spread before its own forward.

        X = max(t_b, end of the last fold);  the spreads run from X on, back to back, g = 1 .. G
        F_0 = X;  F_g = max(F_{g-1}, end of spread g) + t_f(g);  iteration = F_G

    Fold is a reduce-scatter (or a push to servers), spread an all-gather (or a pull); g counts
    groups in forward order. A group is of whole modules (the tensors that share a name up to its
    last dot) and closes before the module with which it would reach `mib`.

    Args:
        trace: gives sizes (bytes) and the forward order (`consumers`); times are not used.
        link: not used.
        options: fusion threshold in MiB.

    Raises:
        UsageError: `mib` is not above 0, or a bad DAG in the trace.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2, 3], num_elements=[3 << 20, 4 << 20, 1 << 20])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> plan = make_plan("dear:mib=6", trace, link)
        >>> plan.halves, [[part.tensor for part in message.parts] for message in plan.messages]
        (True, [[2], [0, 1]])

    Reference:
        Zhang et al., 2023, ICDCS (DeAR); grouping: the authors' code. Departs: they search the
        threshold while training, by Bayesian optimisation; here it stays, or is searched before
        (`--tune`). Buffers are not padded. The spreads are submitted all at once, where the paper
        issues each when the group before it has arrived; none starts later for that.
    """
    limit_bytes = ceil(options.mib * 2**20)
    modules = list(modules_of(trace).values())
    sizes = [sum(trace.tensors[i].num_bytes for i in module) for module in modules]
    stops = close_before_exceed(sizes, limit_bytes - 1)
    messages: list[Message] = []
    for start, stop in zip([0, *stops], stops, strict=False):
        members: dict[str, list[TensorSlice]] = {}
        for index in (i for module in modules[start:stop] for i in module):
            tensor = trace.tensors[index]
            members.setdefault(tensor.dtype, []).append(TensorSlice(index, 0, tensor.num_elements))
        messages += [Message(parts=tuple(parts)) for parts in members.values()]
    # Folded in the order of readiness: a group is ready with its first tensor of the trace.
    messages.sort(key=lambda m: min(part.tensor for part in m.parts), reverse=True)
    groups = f"{len(messages)} {'group' if len(messages) == 1 else 'groups'}"
    return plan_for(
        "dear",
        trace,
        messages,
        crosses_iteration=True,
        halves=True,
        reason=f"{groups} of modules below {format_bytes(limit_bytes)} in forward "
        f"order, folded during backward, spread before their own forward",
    )


def modules_of(trace: Trace) -> dict[str, list[int]]:
    """Indices of each module's tensors, modules by their first tensor in the forward order.

    A tensor whose name has no dot counts as a module of its own.

    Example:
        >>> from testbed.base.trace import TraceTensor
        >>> tensors = tuple(
        ...     TraceTensor(name=name, num_elements=1, forward_s=1, backward_s=1)
        ...     for name in ("conv.weight", "conv.bias", "scale")
        ... )
        >>> modules_of(Trace(name="t", device="cpu", batch_size=1, tensors=tensors))
        {'conv': [0, 1], 'scale': [2]}
    """
    found: dict[str, list[int]] = {}
    for index in forward_order(trace):
        name = trace.tensors[index].name
        found.setdefault(name.rpartition(".")[0] or name, []).append(index)
    return found


DEAR = Part(
    name="dear",
    summary="reduce-scatter behind backward, all-gather behind the next forward (mib)",
    origin=PUBLISHED,
    build=plan_dear,
    options=DearOptions,
    facts=lambda options: SchedulerFacts(
        needs_profile=False,
        crosses_iteration=True,
        tried=("", "mib=4", "mib=8"),
    ),
    knobs=lambda options: {"mib": Range(1, 256)},  # as far as the authors search
)
