"""A plan must carry every element exactly once, for the very tensors of the model at hand."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.errors import UsageError
from testbed.scheduling.plan import Plan


def check_coverage(plan: Plan) -> None:
    """Check that every element of every tensor is in exactly one part.

    Raises:
        UsageError: names the tensor and the first element that is missing or there twice.
    """
    covered: list[list[tuple[int, int]]] = [[] for _ in plan.names]
    for number, message in enumerate(plan.messages):
        if not 0 <= message.channel < plan.num_channels:
            raise UsageError(
                f"plan of {plan.scheduler!r}: message {number} is on channel {message.channel}; "
                f"the plan has {plan.num_channels}, numbered from 0"
            )
        for part in message.parts:
            if not 0 <= part.tensor < len(covered):
                raise UsageError(f"plan of {plan.scheduler!r}: there is no tensor {part.tensor}")
            covered[part.tensor].append((part.start, part.stop))
    for name, size, parts in zip(plan.names, plan.num_elements, covered, strict=True):
        reached = 0
        for start, stop in sorted(parts):
            if start != reached or stop < start:
                raise UsageError(
                    f"plan of {plan.scheduler!r}: tensor {name!r} goes on at element {start}, "
                    f"expected {reached}; every element must be sent exactly once"
                )
            reached = stop
        if reached != size or not parts:
            raise UsageError(
                f"plan of {plan.scheduler!r}: tensor {name!r} ends at element {reached} of {size}; "
                "every element must be sent exactly once"
            )


def check_model(plan: Plan, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Check that the plan was made for these tensors, in whatever order.

    Raises:
        UsageError: says which tensor differs.
    """
    ours = dict(zip(names, sizes, strict=True))
    theirs = dict(zip(plan.names, plan.num_elements, strict=True))
    differing = [n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)]
    if differing:
        name = min(differing)
        raise UsageError(
            f"plan of {plan.scheduler!r} is for another model: tensor {name!r} has "
            f"{theirs.get(name, 'no')} elements in the plan and {ours.get(name, 'no')} in the "
            "model; make the plan from this model's own trace"
        )
