"""Which value of a memory plan an operator makes, in a step that may differ a little from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from testbed.base.errors import UsageError
from testbed.memory.lifetimes import RECOMPUTE
from testbed.memory.plan import MemoryPlan
from testbed.memory.storages import allocated_bytes

AHEAD = 16  # so many operators of the plan may be missing in a step at once
SAME_SHARE = 0.5  # of the operators must be found, or it is another model

Makes = tuple[tuple[int, int, str], ...]
"""What an operator makes: which output is which value, and what becomes of it."""


class Script:
    """The operators of a plan that make values, in order.

    Args:
        plan: what becomes of each value.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self.names: list[str] = []
        self.sizes: list[int] = []
        self.makes: list[Makes] = []
        ops: dict[int, list[int]] = {}
        for number, made in enumerate(plan.values):
            ops.setdefault(made.op, []).append(number)
        for numbers in ops.values():
            first = plan.values[numbers[0]]
            self.names.append(first.name)
            self.sizes.append(first.num_bytes)
            self.makes.append(tuple((plan.values[n].output, n, plan.actions[n]) for n in numbers))
        self.made_again = frozenset(
            made.name
            for made, action in zip(plan.values, plan.actions, strict=True)
            if action == RECOMPUTE
        )


class Expected:
    """Which operator of a plan is the one that runs.

    A recording on fake tensors and a step may differ in a few small operators (masks, constants):
    operators are matched by name and size, and those that have no match are passed over.

    Args:
        script: the operators, in order.

    Attributes:
        matched: number of operators that were found.
    """

    def __init__(self, script: Script) -> None:
        self.made_again = script.made_again
        self.matched = 0
        self._script = script
        self._next = 0

    def match(self, name: str, outputs: list[torch.Tensor]) -> Makes:
        """What the operator makes, which has just run; nothing if the plan does not know it."""
        script = self._script
        for at in range(self._next, min(self._next + AHEAD, len(script.names))):
            if script.names[at] != name:
                continue
            makes = script.makes[at]
            output = makes[0][0]
            if len(outputs) <= output:
                continue
            if allocated_bytes(outputs[output].untyped_storage()) == script.sizes[at]:
                self._next = at + 1
                self.matched += 1
                return makes
        return ()

    def check(self) -> None:
        """Raise UsageError where the forward pass was another one than that of the plan."""
        if self.matched < SAME_SHARE * len(self._script.names):
            raise UsageError(
                f"the forward pass ran {self.matched} of the {len(self._script.names)} operators "
                "that the memory plan was made for; expected the same model and batch in every "
                "step; use --memory none for a model whose operators depend on its input"
            )


def let_overwrite(model: torch.nn.Module, layers: Iterable[str]) -> None:
    """Switch modules to writing their result over their input, those that can be.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.ReLU())
        >>> let_overwrite(model, ["0"])
        >>> model
        Sequential(
          (0): ReLU(inplace=True)
        )
    """
    for name in layers:
        module = model.get_submodule(name)
        if isinstance(module, torch.nn.ReLU):
            module.inplace = True


@contextlib.contextmanager
def overwriting(model: torch.nn.Module, layers: Iterable[str]) -> Iterator[None]:
    """Inside, modules write their result over their input, those that can be; see `let_overwrite`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.ReLU())
        >>> with overwriting(model, ["0"]):
        ...     model[0].inplace
        True
        >>> model[0].inplace
        False
    """
    found = [model.get_submodule(name) for name in layers]
    switched = [m for m in found if isinstance(m, torch.nn.ReLU) and not m.inplace]
    try:
        for module in switched:
            module.inplace = True
        yield
    finally:
        for module in switched:
            module.inplace = False
