"""Which value of a memory plan an operator makes, in a step that may differ a little from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from testbed.base.errors import UsageError
from testbed.memory.planning.lifetimes import RECOMPUTE
from testbed.memory.planning.plan import MemoryPlan
from testbed.memory.recording.storages import allocated_bytes

AHEAD = 16  # so many operators of the plan may be missing in a step at once
SAME_SHARE = 0.5  # of the bytes must be made, or it is another model
CAST = str(torch.ops.aten._to_copy.default)

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
        self.num_bytes = 0  # casts left out
        ops: dict[int, list[int]] = {}
        for number, made in enumerate(plan.values):
            ops.setdefault(made.op, []).append(number)
        for numbers in ops.values():
            first = plan.values[numbers[0]]
            self.names.append(first.name)
            self.sizes.append(first.num_bytes)
            self.num_bytes += first.num_bytes if first.name != CAST else 0
            self.makes.append(tuple((plan.values[n].output, n, plan.actions[n]) for n in numbers))
        self.made_again = frozenset(
            made.name
            for made, action in zip(plan.values, plan.actions, strict=True)
            if action == RECOMPUTE
        )


class Expected:
    """Which operator of a plan is the one that runs.

    A recording on fake tensors and a step may differ in a few small operators (masks, constants):
    operators are matched by name and size, and those that have no match are passed over. Casts may
    all be missing: a second forward pass in one autocast region finds its weights cast already.

    Args:
        script: the operators, in order.

    Attributes:
        matched_bytes: that operators have made which were found, casts left out.
    """

    def __init__(self, script: Script) -> None:
        self.made_again = script.made_again
        self.matched_bytes = 0
        self._script = script
        self._next = 0

    def match(self, name: str, outputs: list[torch.Tensor]) -> Makes:
        """What the operator makes, which has just run; nothing if the plan does not know it."""
        script = self._script
        missing = 0
        for at in range(self._next, len(script.names)):
            if script.names[at] == name:
                makes, size = script.makes[at], script.sizes[at]
                output = makes[0][0]
                made = outputs[output : output + 1]
                if made and allocated_bytes(made[0].untyped_storage()) == size:
                    self._next = at + 1
                    self.matched_bytes += size if name != CAST else 0
                    return makes
            missing += script.names[at] != CAST
            if missing == AHEAD:
                break
        return ()

    def check(self) -> None:
        """Raise UsageError where the forward pass was another one than that of the plan."""
        expected_bytes = self._script.num_bytes
        if self.matched_bytes < SAME_SHARE * expected_bytes:
            raise UsageError(
                f"the forward pass made {self.matched_bytes} of the {expected_bytes} bytes that "
                "the memory plan was made for; expected the same model and batch in every "
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
