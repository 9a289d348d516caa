"""A plan must be for the very tensors of the model at hand."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.errors import UsageError
from testbed.scheduling.plan import Plan
from testbed.scheduling.plan_file import plan_problem


def check_plan(plan: Plan, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Check that the plan was made for these tensors, in whatever order.

    Raises:
        UsageError: says which tensor differs, or what is wrong with the plan itself.
    """
    problem = plan_problem(plan)
    if problem is not None:
        raise UsageError(f"plan of {plan.scheduler!r}: {problem}")
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
